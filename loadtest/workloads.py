"""The requests of one user in each scenario, in order.  Pure but for the prompts' source.

A workload is a generator: it yields an `Ask`, is sent the `Answer`, and yields the next `Ask`.  It never ends by itself.  All
its choices come from its own `random.Random`.  So the same seed gives the same requests, whatever the server answers, unless an
answer is part of the next request (`multiturn`).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from loadtest import prompts
from loadtest.timing import Answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Knobs:
    """The options of a workload."""

    model: str
    prompt_tokens: int = 128
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    duration_s: float = 30.0


@dataclass(frozen=True)
class Ask:
    """One request to make."""

    label: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    abort_after: int | None = None
    """Number of chunks with tokens after which the client leaves the stream; None: it reads all."""
    expect_status: int = 200
    """The status to expect; if it is not 200, the answer must be an OpenAI error."""
    raw: bytes | None = None
    """Bytes to send instead of `body`."""
    content_type: str = "application/json"


Workload = Generator[Ask, Answer, None]
Make = Callable[[Knobs, random.Random, Callable[[], float]], Workload]
"""(knobs, chance, seconds since the load began) -> workload."""


def chat(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Chat completions with prompts of one length."""
    while True:
        yield _chat(knobs, "chat", [_user(knobs, chance)])


def completion(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Completions with prompts of one length."""
    while True:
        yield _completion(knobs, "completion", prompts.prompt("code", knobs.prompt_tokens, chance))


def mixed(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Both endpoints; prompts of 1/16 to 4 times the given length, answers of 1/8 to 2 times, log-uniform."""
    while True:
        length = log_uniform(knobs.prompt_tokens / 16, knobs.prompt_tokens * 4, chance)
        limit = log_uniform(knobs.max_tokens / 8, knobs.max_tokens * 2, chance)
        text = prompts.prompt("code", length, chance)
        size = "short" if limit <= knobs.max_tokens / 2 else "long"
        if chance.random() < 0.5:
            yield _chat(knobs, f"chat {size}", [{"role": "user", "content": text}], limit)
        else:
            yield _completion(knobs, f"completion {size}", text, limit)


def multiturn(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Conversations of four turns after one long system prompt that all users share."""
    shared = {"role": "system", "content": prompts.prompt("prose", knobs.prompt_tokens * 2, random.Random(knobs.seed))}
    while True:
        messages = [shared]
        for turn in range(1, 5):
            messages = [*messages, {"role": "user", "content": prompts.prompt("code", knobs.prompt_tokens // 4, chance)}]
            answer = yield _chat(knobs, f"turn {turn}", messages)
            messages = [*messages, {"role": "assistant", "content": answer.text}]


def domain_shift(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Code in the first half of the time, prose in the second."""
    while True:
        domain: prompts.Domain = "code" if elapsed() < knobs.duration_s / 2 else "prose"
        yield _completion(knobs, domain, prompts.prompt(domain, knobs.prompt_tokens, chance))


def aborts(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """The client leaves about half of the streams after a few chunks; the others must be complete."""
    while True:
        text = prompts.prompt("code", knobs.prompt_tokens, chance)
        if chance.random() < 0.5:
            body = _completion(knobs, "aborted", text, knobs.max_tokens * 4).body
            yield Ask("aborted", COMPLETIONS, body, abort_after=chance.randint(1, 5))
        else:
            yield _completion(knobs, "whole", text)


def bad_input(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Two of three requests are invalid; the third is valid and must be served normally."""
    wrong = wrong_asks(knobs)
    while True:
        yield chance.choice(wrong)
        yield chance.choice(wrong)
        yield _completion(knobs, "right", prompts.prompt("code", knobs.prompt_tokens, chance))


def wrong_asks(knobs: Knobs) -> list[Ask]:
    """One request for every kind of invalid input."""
    good = _completion(knobs, "", "x = 1\n").body

    def but(path: str = COMPLETIONS, status: int = 400, **changes: Any) -> Ask:
        body = {**good, **changes}
        if path == CHAT:
            body.pop("prompt")
        return Ask(f"bad {next(iter(changes))}", path, body, expect_status=status)

    def raw(label: str, content: bytes, status: int = 400, content_type: str = "application/json") -> Ask:
        return Ask(f"bad {label}", COMPLETIONS, raw=content, expect_status=status, content_type=content_type)

    return [
        but(model="no-such-model", status=404),
        but(temperature=-1),
        but(temprature=0.5),
        but(top_p=7),
        but(n=10_000),
        but(max_tokens=10**9),
        but(stop=[["x"]]),
        but(prompt="x y z " * 100_000),
        but(CHAT, messages=5),
        but(CHAT, messages=[{"content": "from nobody"}]),
        raw("json", b'{"model": '),
        raw("nan", b'{"temperature": NaN}'),
        raw("utf-8", b'{"prompt": "\xff"}'),
        raw("nesting", b"[" * 50_000),
        raw("media type", json.dumps(good).encode(), status=415, content_type="text/plain"),
        Ask("bad path", "/v1/nothing", good, expect_status=404),
    ]


def log_uniform(low: float, high: float, chance: random.Random) -> int:
    """A whole number between `low` and `high`, at least 1, whose logarithm is uniform."""
    return max(1, round(math.exp(chance.uniform(math.log(max(low, 1)), math.log(max(high, 1))))))


def _user(knobs: Knobs, chance: random.Random) -> dict[str, str]:
    return {"role": "user", "content": prompts.prompt("code", knobs.prompt_tokens, chance)}


def _common(knobs: Knobs, max_tokens: int | None) -> dict[str, Any]:
    return {
        "model": knobs.model,
        "max_tokens": max_tokens or knobs.max_tokens,
        "temperature": knobs.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat(knobs: Knobs, label: str, messages: list[dict[str, str]], max_tokens: int | None = None) -> Ask:
    return Ask(label, CHAT, {**_common(knobs, max_tokens), "messages": messages})


def _completion(knobs: Knobs, label: str, text: str, max_tokens: int | None = None) -> Ask:
    return Ask(label, COMPLETIONS, {**_common(knobs, max_tokens), "prompt": text})
