"""What a change of drafters costs in acceptance, with the demo models and real text: the shipper, the protocol and the drafter
are the real ones; sockets and vLLM are left out, as greedy texts and their features can be computed beforehand."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer

from backend.config.settings import DraftingSettings
from backend.drafter.process import DrafterModel, build_proposer
from backend.engine.features import FeatureShipper
from backend.fleet import DraftCounters
from backend.lab.demo.llama import features, generate, load_llama
from backend.models.checkpoint import load_fc
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.head_config import load_config
from tests.unit.backend.engine.test_handover import Bench, K

REQUESTS, PROMPT, TOKENS, CHANGE_AT = 6, 200, 120, 40


@dataclass
class Texts:
    """Greedy continuations `[requests, tokens]` and the target's features of every position."""

    tokens: list[list[int]]
    rows: torch.Tensor


@pytest.fixture(scope="module")
def texts() -> Texts:
    target = load_llama(TARGET_DIR)
    layers = load_config(str(DRAFTER_DIR), str(TARGET_DIR)).aux_layers
    source = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json")).encode(inspect.getsource(argparse)).ids
    prompts = torch.tensor([source[900 * i : 900 * i + PROMPT] for i in range(REQUESTS)])
    with torch.no_grad():
        text = generate(target, prompts, TOKENS)
        _, rows = features(target, text, layers)
    return Texts(text.tolist(), rows)


class DemoBench(Bench):
    """Both drafters have the demo's head."""

    def __init__(self, texts: Texts, monkeypatch: pytest.MonkeyPatch, handover_bytes: int) -> None:
        model = DrafterModel(str(TARGET_DIR), str(DRAFTER_DIR))
        self.connect(monkeypatch, lambda name: build_proposer(model, DraftingSettings(gpus=0)))
        project = load_fc(str(DRAFTER_DIR))
        self.shipper = FeatureShipper(lambda head: project, handover_bytes=handover_bytes)
        self.tokens, self.rows, self.lengths = texts.tokens, texts.rows, [0] * REQUESTS


def serve(
    texts: Texts, monkeypatch: pytest.MonkeyPatch, handover_bytes: int, changes: bool
) -> tuple[float, float, DraftCounters]:
    """Acceptance lengths before and after the change, what was handed over, and the bytes sent to the second drafter."""
    bench, name, phase = DemoBench(texts, monkeypatch, handover_bytes), "d0", 0
    drafts, accepted = [0, 0], [0, 0]
    lengths = [PROMPT + 1] * REQUESTS
    bench.assign(name)
    while min(lengths) < PROMPT + TOKENS - K:
        if not phase and min(lengths) >= PROMPT + CHANGE_AT:
            phase, name = 1, "d1" if changes else "d0"
            bench.assign(name)
        live = [i for i in range(REQUESTS) if lengths[i] < PROMPT + TOKENS - K]
        with torch.no_grad():
            bench.step({i: lengths[i] - 1 - bench.lengths[i] for i in live})
        for i in live:
            draft, true = bench.lines[name].drafts[f"r{i}"], texts.tokens[i][lengths[i] : lengths[i] + K]
            kept = next((n for n in range(K) if draft[n] != true[n]), K)
            drafts[phase], accepted[phase] = drafts[phase] + 1, accepted[phase] + kept
            lengths[i] += kept + 1
    taken = bench.shipper.take_counters()
    before, after = (1 + accepted[n] / drafts[n] for n in range(2))
    return before, after, taken["d1"]


def test_acceptance_after_a_change_of_drafters(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    before, warm, _ = serve(texts, monkeypatch, 1 << 24, changes=False)
    _, handed, given = serve(texts, monkeypatch, 1 << 24, changes=True)
    _, cold, nothing = serve(texts, monkeypatch, 0, changes=True)
    print(f"acceptance length {before:.3f} before; undisturbed {warm:.3f}, handed over {handed:.3f}, cold {cold:.3f}")
    print(f"{given.handover_bytes} of {given.bytes_sent} bytes sent to the new drafter were handed over")
    assert nothing.handovers == 0
    assert given.handovers == REQUESTS
    assert given.handover_rows >= REQUESTS * (PROMPT + CHANGE_AT - K)
    assert given.handover_bytes == given.handover_rows * texts.rows.shape[-1] // 3 * 4 < given.bytes_sent
    assert handed == pytest.approx(warm, rel=0.05)
    assert cold < 0.95 * warm
