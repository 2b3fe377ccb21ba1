"""Repairs of how vLLM keeps to grammars.  Engine process, engine thread.

`WholeGrammar`: grammars of llguidance.  `DeadEnds` ends requests whose grammar allows no token that may be drawn.  Stop tokens,
`allowed_token_ids`, bad words and `min_tokens` forbid tokens too.  Where nothing is left, the sampler still names a token, the
grammar rejects it, and vLLM fails the request.  Here it ends before that token instead.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar


@dataclass
class WholeGrammar(GuidanceGrammar):
    """Ends where the grammar ends.

    vLLM takes the end-of-text token for the end also where the grammar goes on after it, and takes back one token too many if
    a draft had two behind the end.  llguidance takes back wrongly where the end-of-text token is among what is taken back.
    """

    length: int = 0
    """Tokens that the matcher has accepted."""
    before_ends: list[tuple[int, Any]] = field(default_factory=list)
    """Length and matcher before each end-of-text token."""
    beyond: int = 0
    """Tokens behind the end, which the matcher does not know."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """vLLM's method of the same name."""
        for token in tokens:
            if self.ll_matcher.is_stopped():
                self.beyond += 1
                self.terminated = True
                continue
            if token == self.ll_tokenizer.eos_token:
                self.before_ends.append((self.length, self.ll_matcher.deep_copy()))
            if not self.ll_matcher.consume_token(token):
                self.check_error()
                return False
            self.length += 1
            self.terminated = token == self.ll_tokenizer.eos_token and self.ll_matcher.is_stopped()
        return True

    def rollback(self, num_tokens: int) -> None:
        """vLLM's method of the same name."""
        behind = min(num_tokens, self.beyond)
        self.beyond -= behind
        if num_tokens > behind:
            length = self.length
            self.length -= num_tokens - behind
            while self.before_ends and self.before_ends[-1][0] >= self.length:
                length, self.ll_matcher = self.before_ends.pop()
            self.ll_matcher.rollback(length - self.length)
            self.check_error()
        self.terminated = self.beyond > 0


def repair_guidance() -> None:
    """Makes vLLM use `WholeGrammar`."""
    backend_guidance.GuidanceGrammar = WholeGrammar


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
