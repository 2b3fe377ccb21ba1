"""Updates of the weights that stay incomplete, on a real engine: what it says afterwards, and that the next one works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from vllm.sampling_params import SamplingParams

from backend.models.demo import TARGET_DIR
from tests.support.processes import Verifier

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    started = Verifier(tmp_path_factory.mktemp("v"), {"mode": "off"})
    yield started
    started.close()


@pytest.fixture(scope="module")
def others() -> Tensors:
    """The target's tensors, but for some of other signs."""
    tensors = load_file(TARGET_DIR / "model.safetensors")
    return {name: -tensor if "q_proj" in name or "down_proj" in name else tensor for name, tensor in tensors.items()}


def call(verifier: Verifier, method: str, *arguments: Any) -> str | None:
    """What went wrong, if anything did."""
    number = verifier.client.call(method, *arguments)
    verifier.client.run_until(lambda: number in verifier.client.results)
    return verifier.client.results[number]


def said(verifier: Verifier) -> list[int]:
    (answer,) = verifier.client.generate([[5, 6, 7]], GREEDY)
    return answer.tokens


def load(verifier: Verifier, tensors: Tensors) -> None:
    assert call(verifier, "start_weight_update") is None
    assert call(verifier, "update_weights", save(tensors)) is None
    assert call(verifier, "finish_weight_update") is None


def test_an_update_by_tensors_that_stays_incomplete(verifier: Verifier, others: Tensors) -> None:
    """Layers of which a part has come are the hard case: vLLM keeps that part for whatever is loaded next."""
    first = said(verifier)
    for name in ("q_proj", "k_proj", "down_proj"):
        assert call(verifier, "start_weight_update") is None
        part = {each: tensor for each, tensor in others.items() if name in each}
        assert call(verifier, "update_weights", save(part)) is None
        assert "tensors did not come" in str(call(verifier, "finish_weight_update"))
        assert said(verifier) == first
    load(verifier, others)
    second = said(verifier)
    assert second != first
    assert call(verifier, "start_weight_update") is None
    assert "nothing has changed" in str(call(verifier, "finish_weight_update"))
    assert said(verifier) == second
    load(verifier, load_file(TARGET_DIR / "model.safetensors"))
    assert said(verifier) == first
