"""Repairs vLLM's grammars of llguidance.  Engine process, engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar


@dataclass
class WholeGrammar(GuidanceGrammar):
    """Ends where the grammar ends.

    vLLM takes the end-of-text token for the end also where the grammar goes on after it, and takes back one token too many if
    a draft had two behind the end.
    """

    beyond: int = 0
    """Tokens behind the end, which the matcher does not know."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """vLLM's method of the same name."""
        for token in tokens:
            if self.ll_matcher.is_stopped():
                self.beyond += 1
                self.terminated = True
            elif not self.ll_matcher.consume_token(token):
                self.check_error()
                return False
            else:
                self.terminated = token == self.ll_tokenizer.eos_token and self.ll_matcher.is_stopped()
        return True

    def rollback(self, num_tokens: int) -> None:
        """vLLM's method of the same name."""
        behind = min(num_tokens, self.beyond)
        self.beyond -= behind
        if num_tokens > behind:
            self.ll_matcher.rollback(num_tokens - behind)
            self.check_error()
        self.terminated = self.beyond > 0


def repair_guidance() -> None:
    """Makes vLLM use `WholeGrammar`."""
    backend_guidance.GuidanceGrammar = WholeGrammar
