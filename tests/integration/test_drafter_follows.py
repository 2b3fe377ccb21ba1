"""A drafter whose head shares tensors with its target takes the new ones when the target's weights are exchanged."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.sampling_params import SamplingParams

from backend.engine.client import EngineCodec
from backend.fleet.stats import Weights
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from tests.support.draws import accepted
from tests.support.processes import Drafter, Verifier, demo_models, together

pytestmark = pytest.mark.engine

WEIGHTS = "model.safetensors"
PROMPTS = [[5 + (7 * i + j * j) % 900 for j in range(12)] for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def verifier(directory: Path) -> Iterator[Verifier]:
    """The demo's and its drafter, but that the head has the target's embedding and output matrix."""
    head = Path(shutil.copytree(DRAFTER_DIR, directory / "head"))
    tensors = load_file(head / WEIGHTS)
    save_file({n: t for n, t in tensors.items() if "lm_head" not in n}, head / WEIGHTS, metadata={"format": "pt"})
    paths = msgspec.structs.replace(demo_models(), drafter_dir=str(head))
    settings = {"mode": "sync", "num_speculative_tokens": 4, "verifier": {"lookup": False}}
    starts = partial(Verifier, directory, settings, paths), partial(Drafter, directory, paths, gpus=0, cache_tokens=8192)
    with together(*starts) as (verifier, drafter):
        verifier.set_drafters(drafter.ref)
        yield verifier


def speak(verifier: Verifier, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """Texts, and the share of draft tokens that were accepted."""
    before = accepted(verifier)
    texts = [answer.tokens for answer in verifier.client.generate(prompts, GREEDY)]
    drafted, right = (now - then for now, then in zip(accepted(verifier), before, strict=True))
    return texts, right / max(drafted, 1)


def test_it_drafts_as_well_for_the_same_model_with_its_tokens_in_another_order(verifier: Verifier, tmp_path: Path) -> None:
    """A drafter with the earlier embedding would draft other tokens altogether."""
    speak(verifier, PROMPTS)
    texts, usual = speak(verifier, PROMPTS)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(1))
    places = order.argsort().tolist()
    folder = Path(shutil.copytree(TARGET_DIR, tmp_path / "other"))
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    save_file(tensors | {name: tensors[name][order]}, folder / WEIGHTS, metadata={"format": "pt"})
    verifier.client.dealer.send(*EngineCodec().call(1, "reload_weights", [str(folder), "other", 1]))
    client, loaded = verifier.client, Weights(1, "other", str(folder))
    client.run_until(lambda: client.stats is not None and client.stats.weights == loaded)
    prompts = [[places[token] for token in prompt] for prompt in PROMPTS]
    share = 0.0
    while share < 0.8 * usual:
        found, share = speak(verifier, prompts)
        assert found == [[places[token] for token in text] for text in texts]
    assert usual > 0.2
