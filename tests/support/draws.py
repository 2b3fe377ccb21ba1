"""Texts drawn by an engine, tested against the exact probabilities that plain decoding gives.  Tests only."""

import copy
import math
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import SamplingParams

from backend.lab.bench.load import APART
from backend.wire.engine import RequestOptions
from tests.support.processes import Verifier
from tests.support.statistics import chi_square

Text = tuple[int, ...]
PROCESSED = RequestOptions(learn=False, logprobs_mode="processed")
LIKELY = 20
"""A beginning that so many draws are expected to have is told apart by its next token."""
AT_ONCE = 500


class Exact:
    """The target's probabilities of the first tokens after a prompt."""

    def __init__(self, plain: Verifier, prompt: list[int], params: SamplingParams, depth: int, draws: int) -> None:
        """Asks `plain`, an engine of mode off, about beginnings of up to `depth` tokens that are likely in so many draws."""
        self.next: dict[Text, dict[int, float]] = {}
        """By beginning: the probabilities of the next token."""
        level: dict[Text, float] = {(): 1.0}
        for place in range(depth):
            for text, found in zip(level, _next_tokens(plain, prompt, params, list(level)), strict=True):
                self.next[text] = found
            level = {
                (*text, token): p * chance
                for text, p in level.items()
                for token, chance in self.next[text].items()
                if p * chance * draws > LIKELY and place + 1 < depth
            }

    def p_value(self, drawn: Sequence[Sequence[int]]) -> float:
        """The p-value of the test that texts, of at least `depth` tokens each, have these probabilities."""
        bins: dict[Text, float] = {}
        stack: list[tuple[Text, float]] = [((), 1.0)]
        while stack:
            text, p = stack.pop()
            for token, chance in self.next[text].items():
                child = (*text, token)
                if child in self.next:
                    stack.append((child, p * chance))
                else:
                    bins[child] = p * chance
        return chi_square([self._bin(text) for text in drawn], bins)

    def _bin(self, text: Sequence[int]) -> Text:
        length = 1
        while tuple(text[:length]) in self.next:
            length += 1
        return tuple(text[:length])


def _next_tokens(plain: Verifier, prompt: list[int], params: SamplingParams, texts: list[Text]) -> list[dict[int, float]]:
    """The probabilities of the next token behind each of `texts`, which count as output."""
    client, ids = plain.client, []
    for text in texts:
        request = copy.deepcopy(params)
        request.max_tokens, request.logprobs, request.seed = len(text) + 1, -1, 0
        ids.append(client.add(prompt, request, emitted=text, options=PROCESSED))
    client.finish_all()
    found = []
    for each in ids:
        (top,) = [output.new_logprobs for output in client.answers.pop(each).outputs if output.new_logprobs is not None]
        pairs = zip(top.logprob_token_ids[0].tolist(), top.logprobs[0].tolist(), strict=True)
        # The drawn token comes first, and once more in its place.
        found.append({token: math.exp(logprob) for token, logprob in pairs if math.isfinite(logprob)})
    return found


def draw(verifier: Verifier, prompt: list[int], params: Sequence[SamplingParams]) -> list[list[int]]:
    """The texts of requests with these parameters, sent `AT_ONCE` at a time."""
    drawn: list[list[int]] = []
    for start in range(0, len(params), AT_ONCE):
        part = [copy.deepcopy(each) for each in params[start : start + AT_ONCE]]
        drawn += [answer.tokens for answer in verifier.client.generate([prompt] * len(part), part, options=APART)]
    return drawn


def accepted(verifier: Verifier) -> tuple[int, int]:
    """Draft tokens verified and accepted so far."""
    counted: list[Any] = list(verifier.client.fresh_stats().drafters.values())
    return sum(each.draft_tokens for each in counted), sum(each.accepted_tokens for each in counted)
