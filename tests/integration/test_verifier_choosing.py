"""One verifier, an EAGLE head and a draft model that knows nothing: requests go where they are drafted for best."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.sampling_params import SamplingParams

from backend.models.demo import DRAFT_MODEL_DIR
from backend.models.writing import WEIGHTS
from tests.support.processes import Drafter, Verifier, together

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

TOKENS = 32


def ask(verifier: Verifier, first: int, count: int) -> list[list[int]]:
    prompts = [[*range(40, 60), 300 + number] for number in range(first, first + count)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [answer.tokens for answer in verifier.client.generate(prompts, params)]


def rounds(verifier: Verifier) -> dict[str, int]:
    stats = verifier.client.fresh_stats()
    return {name: stats.drafters[name].rounds for name in ("drafter-0", "drafter-1") if name in stats.drafters}


def test_requests_go_to_the_drafter_that_brings_most(directory: Path) -> None:
    """The verifier has a head that fits, and a random model."""
    random = Path(shutil.copytree(DRAFT_MODEL_DIR, directory / "random"))
    tensors = {name: torch.randn_like(tensor) for name, tensor in load_file(random / WEIGHTS).items()}
    save_file(tensors, random / WEIGHTS, metadata={"format": "pt"})
    settings = {"mode": "sync", "num_speculative_tokens": 4, "verifier": {"lookup": False}}
    drafters = partial(Drafter, directory), partial(Drafter, directory, draft_model=str(random), name="drafter-1")
    with together(partial(Verifier, directory, settings), *drafters) as (verifier, fits, knows_nothing):
        expected = ask(verifier, 0, 64)
        verifier.set_drafters(fits.ref, knows_nothing.ref)
        found = [text for first in range(0, 64, 8) for text in ask(verifier, first, 8)]
        assert found == expected
        before = rounds(verifier)
        assert before["drafter-1"] > 0, "it had its chance"
        assert [text for first in range(0, 64, 8) for text in ask(verifier, first, 8)] == expected
        after = rounds(verifier)
        # One request of sixteen still tries it, so that half of the rounds have one for it.
        assert after["drafter-1"] - before["drafter-1"] <= 5 * TOKENS < 8 * TOKENS
