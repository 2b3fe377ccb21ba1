"""Thinking budgets in steps that verify drafts: vLLM's own state of each request, kept once per draft token.

Worker process, on the thread that runs the model.  vLLM counts a request's thinking step by step, one token each, and forces
the end of thinking when the budget is used up.  Here each depth of a draft counts as such a step.  The next step knows by the
output's length which of them were taken, and goes on from the state of that depth.  (vLLM 0.32,
`v1/sample/thinking_budget_state.py`; its own counting of drafts differs from plain decoding.)
"""

import copy
from typing import Any

from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata

_DEPTHS, _LENGTH = "outrider_depths", "outrider_length"
"""In a request's state: its states after each depth of the last drafted step, and the length of its output before."""


def settle(metadata: SamplingMetadata) -> None:
    """To be called at the beginning of each step: goes back to the state of the last token that was emitted."""
    holder = metadata.thinking_budget_state_holder
    if holder is None:
        return
    # Or vLLM would count drafts by itself, and lay rows out for its rejection sampler.
    holder.in_spec_mode = False
    for index, state in holder._state.items():
        if depths := state.get(_DEPTHS):
            emitted = len(metadata.output_token_ids[index]) - state[_LENGTH]
            state.clear()
            state.update(depths[max(emitted, 1) - 1])


def count(metadata: SamplingMetadata, depth: int, logits: Tensor) -> Tensor:
    """The logits behind `depth` draft tokens, one row per request, with forced ends of thinking.

    The output lists must contain these draft tokens.
    """
    holder: Any = metadata.thinking_budget_state_holder
    kept = {index: (state.pop(_DEPTHS, []), state.pop(_LENGTH, None)) for index, state in holder._state.items()}
    holder.update_state(metadata.output_token_ids, None)
    logits = holder.apply_to_logits(logits, False, None)
    for index, (depths, length) in kept.items():
        state = holder._state[index]
        after = {name: copy.copy(value) if name == "force_index" else value for name, value in state.items()}
        state[_DEPTHS] = [*depths, after]
        state[_LENGTH] = len(metadata.output_token_ids[index]) if length is None else length
    return logits
