"""Heads as learning writes them: vLLM itself drafts with them in mode `native`, and widened heads draft as before."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams

from backend.config import Settings
from backend.learning.trainer import Job, Trainer
from backend.models.demo import TARGET_DIR
from backend.models.resolve import ResolvedModels, resolve
from tests.support.processes import Drafter, Verifier, demo_models, generate_on, together

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

K = {"num_speculative_tokens": 4, "verifier": {"lookup": False}}
PROMPTS = [[5 + (37 * i + j * j) % 900 for j in range(8 + 3 * i)] for i in range(8)]


def learning(directory: Path, drafter: str) -> ResolvedModels:
    """A fleet that learns, with the head it begins with."""
    settings = {"drafter": drafter, "drafting": {"learning": "always", "learning_dir": str(directory / drafter)}}
    return resolve(Settings.model_validate(settings), print)


def published(paths: ResolvedModels, directory: Path) -> ResolvedModels:
    """What `native` is given: the first version that a trainer publishes."""
    assert paths.drafter_dir is not None
    trainer = Trainer(Job(str(TARGET_DIR), paths.drafter_dir, str(directory), str(directory / "ring")))
    return ResolvedModels(str(TARGET_DIR), trainer.publish(), "eagle")


@pytest.fixture(scope="module")
def verifiers(directory: Path) -> Iterator[dict[str, Verifier]]:
    given, grown = learning(directory, "demo"), learning(directory, "grow")
    native = {
        "given": demo_models(),
        "widened": published(given, directory / "widened"),
        "grown": published(grown, directory / "grown"),
    }
    with together(
        partial(Verifier, directory, {"mode": "off"}),
        *(partial(Verifier, directory, {"mode": "native", **K}, paths) for paths in native.values()),
        partial(Verifier, directory, {"mode": "sync", **K}, given),
        partial(Drafter, directory, given, gpus=0, cache_tokens=4096),
    ) as (*found, drafter):
        found[-1].set_drafters(drafter.ref)
        yield dict(zip(("off", *native, "sync"), found, strict=True))


def test_learned_heads_change_no_text_and_widened_ones_draft_as_before(verifiers: dict[str, Verifier]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = generate_on([each.client for each in verifiers.values()], PROMPTS, params)
    texts = {name: [answer.tokens for answer in each] for name, each in zip(verifiers, answers, strict=True)}
    accepted = {}
    for name in texts:
        assert texts[name] == texts["off"], name
        counters = list(verifiers[name].client.fresh_stats().drafters.values())
        assert name == "off" or sum(each.drafts for each in counters) > 0, name
        accepted[name] = sum(each.accepted_tokens for each in counters)
    assert accepted["widened"] == pytest.approx(accepted["given"], rel=0.05)
    assert accepted["given"] > 50
    assert accepted["sync"] > 50
