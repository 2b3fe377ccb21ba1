"""Fixed responses: requests that must emit given tokens, with real drafting and verification.

A rollout can replay a trace: every request carries its response in `SamplingParams.extra_args` (see `FIXED_RESPONSE`).
The target runs and samples as usual.  Then the outcome is replaced: draft tokens are accepted as far as they agree with the
response, and the response's next token takes the place of the verifier's own.  More tokens cannot be emitted, because the KV
cache of later positions was computed with the draft's tokens.  Acceptance then measures agreement with the trace, not with the
target (*teacher-forced*), and is counted separately.

`FixedResponses` runs in the worker process, on the thread that runs the model; `refuse_unfit` runs in the engine thread.
"""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from backend.wire.engine import FIXED_RESPONSE


def takes_fixed(config: VllmConfig) -> bool:
    """Whether the engine can emit fixed responses: it has vLLM's V1 model runner, and schedules synchronously.

    A response's next token depends on how many it has emitted, which the worker must know when it samples.  In remote modes, no
    step begins early while there are such requests.
    """
    is_remote = config.additional_config["outrider"]["remote"]
    return not config.use_v2_model_runner and (is_remote or not config.scheduler_config.async_scheduling)


def fixed_response(params: SamplingParams | None) -> list[int] | None:
    """The tokens a request must emit; None for a request without a fixed response."""
    if params is None or not params.extra_args:
        return None
    fixed: list[int] | None = params.extra_args.get(FIXED_RESPONSE)
    return fixed


def forced_row(fixed: Sequence[int], emitted: int, draft: Sequence[int]) -> list[int]:
    """What one verification emits: the draft tokens that agree with `fixed` from token `emitted` on, then one more token.

    That token is the response's next one.  After the response's end it is a filler, which the scheduler cuts off at
    `max_tokens`.  Without the filler, the last draft token would not count as accepted.
    """
    accepted = 0
    while accepted < len(draft) and emitted + accepted < len(fixed) and draft[accepted] == fixed[emitted + accepted]:
        accepted += 1
    row = list(fixed[emitted : emitted + accepted + 1])
    return row if len(row) > accepted else [*row, fixed[-1]]


def refuse_unfit(request: EngineCoreRequest, allowed: bool, vocab_size: int, max_model_len: int) -> None:
    """Raises `ValueError` if a request's fixed response cannot be emitted exactly."""
    params = request.sampling_params
    fixed = fixed_response(params)
    if fixed is None or params is None:
        return
    if not allowed:
        raise ValueError("this verifier takes no fixed responses; they need the engine argument async_scheduling=false")
    if not isinstance(fixed, list) or not fixed:
        raise ValueError("a fixed response is a list of one token or more")
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in fixed):
        raise ValueError("a fixed response has a token outside the vocabulary")
    if len(request.prompt_token_ids or ()) + len(fixed) > max_model_len:
        raise ValueError(f"prompt and fixed response are longer than the context of {max_model_len} tokens")
    if params.max_tokens != len(fixed) or not params.ignore_eos or params.stop_token_ids or params.structured_outputs:
        raise ValueError(
            "a fixed response alone decides where it ends: max_tokens its length, ignore_eos, no stops, no grammar"
        )


class FixedResponses:
    """Mixin over vLLM's V1 model runner, where `takes_fixed` says so."""

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """vLLM's method of the same name; `sampled_token_ids` is `[requests, 1 + longest draft]`, padded with -1."""
        output = super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        runner: Any = self
        if not any(fixed_response(runner.requests[each].sampling_params) for each in runner.input_batch.req_ids):
            return output
        sampled = output.sampled_token_ids
        drafts = spec_decode_metadata.draft_token_ids.tolist() if spec_decode_metadata is not None else []
        begin, width = 0, sampled.shape[1]
        rows: list[int] = []
        outcomes: list[list[int]] = []
        for row, request_id in enumerate(runner.input_batch.req_ids):
            drafted = spec_decode_metadata.num_draft_tokens[row] if spec_decode_metadata is not None else 0
            draft, begin = drafts[begin : begin + drafted], begin + drafted
            state = runner.requests[request_id]
            fixed = fixed_response(state.sampling_params)
            if fixed is None or runner.discard_request_mask.np[row]:
                continue
            tokens = forced_row(fixed, len(state.output_token_ids), draft)
            rows.append(row)
            outcomes.append(tokens + [-1] * (width - len(tokens)))
        if rows:
            sampled[rows] = sampled.new_tensor(outcomes)
        return output
