"""Runs closed loops: a fixed number of requests of fixed length in flight, until all prompts are answered.  Parent process."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.client import Answer, EngineClient, sampling
from backend.wire.engine import RequestOptions

TIMEOUT_S = 3600.0
APART = RequestOptions(learn=False)
"""A request that shares no text with others.  A prompt that is asked twice would be drafted for by its first answer."""


class LoadError(Exception):
    """A request ended before its fixed length."""


@dataclass(frozen=True)
class MeasuredLoad:
    """The client's measurements.  `answers` are in the order of the prompts."""

    wall_s: float
    """From the first request's start to the last one's end."""
    answers: list[Answer]
    tokens_per_s: float
    """Measured while the full number of requests was in flight: from the first end after the first tokens of all first
    requests, to the first end after the last request's start.  If there is no such period, over the whole load."""

    @property
    def whole(self) -> list[Answer]:
        """The answers that were not cut short."""
        most = max(len(answer.tokens) for answer in self.answers)
        return [answer for answer in self.answers if len(answer.tokens) == most]


def run_load(
    client: EngineClient, prompts: Sequence[list[int]], tokens: int, temperature: float, concurrency: int
) -> MeasuredLoad:
    """Runs all prompts.  Raises `LoadError`, `TimeoutError`, and what the client's `watch` raises.

    If more prompts than `concurrency` are given, the first answers are cut short, each at another length, so that from the
    beginning requests are of all ages.  Else all would end together where each step emits one token, and where steps emit
    different numbers, the period measured would have every prompt but only a part of the answers.
    """
    is_staggered = len(prompts) > concurrency
    lengths = [-(-tokens * (i + 1) // concurrency) if is_staggered and i < concurrency else tokens for i in range(len(prompts))]
    client.receive()
    began = time.monotonic()
    ids: list[str] = []
    open_ids: set[str] = set()
    ends: list[tuple[float, int]] = []
    """When requests ended while the full number was in flight and writing, and the tokens received until then."""
    while len(ids) < len(prompts) or open_ids:
        while len(open_ids) < concurrency and len(ids) < len(prompts):
            request_id = client.add(prompts[len(ids)], sampling(lengths[len(ids)], temperature), options=APART)
            ids.append(request_id)
            open_ids.add(request_id)
        client.run_until(lambda: any(client.answers[i].finish_reason is not None for i in open_ids), TIMEOUT_S)
        if len(open_ids) == concurrency and all(client.answers[i].tokens for i in ids[:concurrency]):
            ends.append((time.monotonic(), sum(len(client.answers[i].tokens) for i in ids)))
        open_ids.difference_update([i for i in open_ids if client.answers[i].finish_reason is not None])
    answers = [client.answers.pop(request_id) for request_id in ids]
    for answer, length in zip(answers, lengths, strict=True):
        if len(answer.tokens) != length:
            raise LoadError(f"a request ended with {len(answer.tokens)} of {length} tokens ({answer.finish_reason})")
    wall_s = max(answer.last_at for answer in answers) - began
    (first_at, first), (last_at, last) = (ends[0], ends[-1]) if len(ends) > 1 else ((0.0, 0), (wall_s, sum(lengths)))
    return MeasuredLoad(wall_s, answers, (last - first) / (last_at - first_at))
