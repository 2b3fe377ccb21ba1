"""A head under a real verifier is recorded for, put in place and taken back while requests run, and no text changes."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.sampling_params import SamplingParams

from backend.config import Settings
from backend.fleet import Learning
from backend.models.head_config import read_config
from backend.models.resolve import ResolvedModels, resolve
from backend.models.writing import WEIGHTS, write_checkpoint
from backend.wire.engine import RequestOptions
from tests.support.processes import Drafter, Verifier, together
from tests.support.run_drafter import STAND_STILL

pytestmark = pytest.mark.engine

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SETTINGS = {"mode": "sync", "num_speculative_tokens": 4, "verifier": {"lookup": False}, "drafter": "grow"}


def prompts(turn: int) -> list[list[int]]:
    return [[5 + (37 * turn + 7 * i + j * j) % 900 for j in range(8 + 3 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def paths(directory: Path) -> ResolvedModels:
    learning = {"learning_dir": str(directory / "learned")}
    return resolve(Settings.model_validate(SETTINGS | {"drafting": learning}), print)


def learned(drafter: Drafter, message: str = "") -> Learning:
    drafter.tell(message)
    found: Learning = drafter.hear()
    return found


class Traffic:
    """Requests at both verifiers, whose texts are compared."""

    def __init__(self, plain: Verifier, drafted: Verifier, drafter: Drafter) -> None:
        self.plain, self.drafted, self.drafter = plain, drafted, drafter
        self._turn = 0

    def until(self, what: str, more_than: float = 0) -> Learning:
        """Until something has happened; every text is that of plain decoding."""
        while (getattr(found := learned(self.drafter), what) or 0) <= more_than:
            batch, params = prompts(self._turn), PARAMS if self._turn % 2 else GREEDY
            self._turn += 1
            ours = [answer.tokens for answer in self.drafted.client.generate(batch, params, options=RequestOptions())]
            if self._turn % 4 < 2:
                assert ours == [answer.tokens for answer in self.plain.client.generate(batch, params)]
        return found


@pytest.fixture(scope="module")
def traffic(directory: Path, paths: ResolvedModels, plain: Verifier) -> Iterator[Traffic]:
    """At a verifier that decodes plainly and one that is drafted for; its drafter learns."""
    starts = partial(Drafter, directory, paths, gpus=0, cache_tokens=8192), partial(Verifier, directory, SETTINGS, paths)
    with together(*starts) as (drafter, drafted):
        drafted.set_drafters(drafter.ref)
        # `tests/integration/test_train_drafter.py` has one that goes on.
        learned(drafter, STAND_STILL)
        yield Traffic(plain, drafted, drafter)


def test_what_opts_out_is_not_recorded(traffic: Traffic) -> None:
    drafted, drafter = traffic.drafted, traffic.drafter
    # The second batch's news tells the drafter that the first one is over.
    for options in (RequestOptions(learn=False), RequestOptions(), RequestOptions(learn=False), RequestOptions(learn=False)):
        drafted.client.generate(prompts(0), GREEDY, options=options)
    while (found := learned(drafter)).sequences < 8:
        drafted.client.generate(prompts(0)[:1], GREEDY, options=RequestOptions(learn=False))
    assert found.sequences == 8


def test_a_spoiled_head_is_taken_back(traffic: Traffic, paths: ResolvedModels) -> None:
    # What comes is compared with a head whose acceptance is known: of some hundred drafts.
    traffic.until("sequences", 100)
    before = traffic.until("live_acceptance").taken_back
    assert paths.learning_dir is not None
    versions = Path(paths.learning_dir) / "drafter-0" / "versions"
    versions.mkdir(exist_ok=True)
    assert paths.drafter_dir is not None
    good = Path(paths.drafter_dir)
    spoiled = {name: torch.randn_like(tensor) for name, tensor in load_file(good / WEIGHTS).items()}
    (versions / "000900").mkdir()
    write_checkpoint(versions / "000900", read_config(str(good)), spoiled)
    learned(traffic.drafter, str(versions / "000900"))
    traffic.until("taken_back", before)
    assert not (versions / "000900").exists()
