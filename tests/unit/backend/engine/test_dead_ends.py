"""A request whose grammar allows no token that may be drawn ends before the token that the sampler named all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from backend.engine.grammar_repairs import DeadEnds

END = 40


class Grammar:
    """A grammar that has allowed no token but these since the rejected one."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed

    def fill_bitmask(self, mask: torch.Tensor, row: int) -> None:
        for token in self.allowed:
            mask[row, token // 32] |= 1 << token % 32


class Scheduler:
    """Stands for vLLM's."""

    def __init__(self, request: Any, output: EngineCoreOutput) -> None:
        self.requests, self._output = {"r": request}, output
        backend = SimpleNamespace(allocate_token_bitmask=lambda rows: torch.zeros(rows, 2, dtype=torch.int32))
        self.structured_output_manager = SimpleNamespace(backend=backend)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        self.requests.clear()  # vLLM forgets a request that has ended
        return {0: EngineCoreOutputs(outputs=[self._output])}


class Ending(DeadEnds, Scheduler):
    pass


def ended(reason: FinishReason | None, *allowed: int, structured: bool = True) -> EngineCoreOutput:
    request = SimpleNamespace(
        use_structured_output=structured,
        structured_output_request=SimpleNamespace(grammar=Grammar(*allowed)),
        sampling_params=SimpleNamespace(all_stop_token_ids={END}),
    )
    rows = LogprobsLists(np.arange(6).reshape(3, 2), np.zeros((3, 2)), np.zeros(3))
    output = EngineCoreOutput(request_id="r", new_token_ids=[5, 6, 0], new_logprobs=rows, finish_reason=reason)
    Ending(request, output).update_from_output(SimpleNamespace(num_scheduled_tokens={"r": 3}), None)
    return output


@pytest.mark.parametrize(
    ("allowed", "reason"), [((END,), FinishReason.STOP), ((7,), FinishReason.LENGTH), ((), FinishReason.LENGTH)]
)
def test_the_rejected_token_is_taken_back(allowed: tuple[int, ...], reason: FinishReason) -> None:
    output = ended(FinishReason.ERROR, *allowed)
    assert (output.new_token_ids, output.finish_reason) == ([5, 6], reason)
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprob_token_ids.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("reason", "structured"),
    [(None, True), (FinishReason.STOP, True), (FinishReason.LENGTH, True), (FinishReason.ERROR, False)],
)
def test_all_else_stays(reason: FinishReason | None, structured: bool) -> None:
    output = ended(reason, END, structured=structured)
    assert (output.new_token_ids, output.finish_reason) == ([5, 6, 0], reason)
