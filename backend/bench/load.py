"""A closed loop: as many requests in flight as asked, each of fixed length, until all prompts are answered.  Parent process."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from backend.verifier.client import Answer, EngineClient, sampling

TIMEOUT_S = 3600.0


class LoadError(Exception):
    """A request did not end as it had to."""


@dataclass(frozen=True)
class Load:
    """What the client saw.  `answers` are in the order of the prompts."""

    wall_s: float
    """From the first request's start to the last one's end."""
    answers: list[Answer]


def run_load(client: EngineClient, prompts: Sequence[list[int]], tokens: int, temperature: float, concurrency: int) -> Load:
    """Runs all prompts.  Raises `LoadError`, `TimeoutError`, and what the client's `watch` raises."""
    params = sampling(tokens, temperature)
    client.receive()
    began = time.monotonic()
    ids: list[str] = []
    open_ids: set[str] = set()
    while len(ids) < len(prompts) or open_ids:
        while len(open_ids) < concurrency and len(ids) < len(prompts):
            request_id = client.add(prompts[len(ids)], params)
            ids.append(request_id)
            open_ids.add(request_id)
        wait_for_one(client, open_ids)
        open_ids = {i for i in open_ids if client.answers[i].finish_reason is None}
    answers = [client.answers.pop(request_id) for request_id in ids]
    for answer in answers:
        if len(answer.tokens) != tokens:
            raise LoadError(f"a request ended with {len(answer.tokens)} of {tokens} tokens ({answer.finish_reason})")
    return Load(max(answer.last_at for answer in answers) - began, answers)


def run_phases(
    client: EngineClient, prompts: Sequence[Sequence[list[int]]], tokens: int, temperature: float, concurrencies: Sequence[int]
) -> Load:
    """Closed loops one after the other, each with its own prompts; one ends before the next begins."""
    loads = [run_load(client, each, tokens, temperature, n) for each, n in zip(prompts, concurrencies, strict=True)]
    return Load(sum(load.wall_s for load in loads), [answer for load in loads for answer in load.answers])


def wait_for_one(client: EngineClient, request_ids: Collection[str]) -> None:
    """Returns when one of the requests has ended."""
    client.run_until(lambda: any(client.answers[i].finish_reason is not None for i in request_ids), TIMEOUT_S)
