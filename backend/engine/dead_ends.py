"""Ends requests whose grammar allows no token that may be drawn.  Engine process, engine thread.

Stop tokens, `allowed_token_ids`, bad words and `min_tokens` forbid tokens too.  Where nothing is left, the sampler still names
a token, the grammar rejects it, and vLLM fails the request.  Here it ends before that token instead.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason


class DeadEnds:
    """Mixin over a vLLM scheduler."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method of the same name."""
        requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
        structured = {
            name: requests[name]
            for name in scheduler_output.num_scheduled_tokens
            if name in requests and requests[name].use_structured_output
        }
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in outputs.values() if structured else ():
            for output in of_client.outputs:
                if output.finish_reason is FinishReason.ERROR and output.request_id in structured and output.new_token_ids:
                    self._end(output, structured[output.request_id])
        return outputs

    def _end(self, output: EngineCoreOutput, request: Any) -> None:
        """Takes back the last token, which the grammar has rejected.  What the grammar could end with is whole."""
        output.new_token_ids = output.new_token_ids[:-1]
        if (logprobs := output.new_logprobs) is not None:
            output.new_logprobs = logprobs.slice_request(0, len(output.new_token_ids))
        allowed = self.structured_output_manager.backend.allocate_token_bitmask(1)  # type: ignore[attr-defined]
        request.structured_output_request.grammar.fill_bitmask(allowed, 0)
        stops = request.sampling_params.all_stop_token_ids
        whole = any(int(allowed[0, token // 32]) >> token % 32 & 1 for token in stops)
        output.finish_reason = FinishReason.STOP if whole else FinishReason.LENGTH
