"""The scenarios: what their users ask, and the number of users over time.  Pure but for the prompts' source.

A workload is a generator: it yields a `LoadRequest`, is sent the answer's text, and yields the next one.  It never ends by
itself.  All its choices come from its own `random.Random`.  So the same seed gives the same requests, whatever the server
answers, unless an answer is part of the next request (`multiturn`).
"""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

from loadtest import prompts

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


class LoadRequest(NamedTuple):
    """One request to make."""

    label: str
    path: str
    body: dict[str, Any]


Workload = Generator[LoadRequest, str, None]
Make = Callable[[Knobs, random.Random, Callable[[], float]], Workload]
"""(knobs, chance, seconds since the load began) -> workload."""


def chat(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Chat completions with prompts of one length."""
    while True:
        yield _request(knobs, "chat", _user(prompts.prompt("code", knobs.prompt_tokens, chance)))


def completion(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Completions with prompts of one length."""
    while True:
        yield _request(knobs, "completion", prompts.prompt("code", knobs.prompt_tokens, chance))


def mixed(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Both endpoints; prompts of 1/16 to 4 times the given length, answers of 1/8 to 2 times, log-uniform."""
    while True:
        length = log_uniform(knobs.prompt_tokens / 16, knobs.prompt_tokens * 4, chance)
        limit = log_uniform(knobs.max_tokens / 8, knobs.max_tokens * 2, chance)
        text = prompts.prompt("code", length, chance)
        size = "short" if limit <= knobs.max_tokens / 2 else "long"
        is_chat = chance.random() < 0.5
        yield _request(knobs, f"{'chat' if is_chat else 'completion'} {size}", _user(text) if is_chat else text, limit)


def multiturn(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Conversations of four turns after one long system prompt that all users share."""
    shared = {"role": "system", "content": prompts.prompt("prose", knobs.prompt_tokens * 2, random.Random(knobs.seed))}
    while True:
        messages = [shared]
        for turn in range(1, 5):
            messages = messages + _user(prompts.prompt("code", knobs.prompt_tokens // 4, chance))
            text = yield _request(knobs, f"turn {turn}", messages)
            messages = [*messages, {"role": "assistant", "content": text}]


def domain_shift(knobs: Knobs, chance: random.Random, elapsed: Callable[[], float]) -> Workload:
    """Code in the first half of the time, prose in the second."""
    while True:
        domain: prompts.Domain = "code" if elapsed() < knobs.duration_s / 2 else "prose"
        yield _request(knobs, domain, prompts.prompt(domain, knobs.prompt_tokens, chance))


def log_uniform(low: float, high: float, chance: random.Random) -> int:
    """A whole number between `low` and `high`, at least 1, whose logarithm is uniform."""
    return max(1, round(math.exp(chance.uniform(math.log(max(low, 1)), math.log(max(high, 1))))))


def _request(knobs: Knobs, label: str, content: str | list[dict[str, str]], max_tokens: int | None = None) -> LoadRequest:
    """A streamed completion of a text, or a chat after messages."""
    is_text = isinstance(content, str)
    body = {
        "model": knobs.model,
        "max_tokens": max_tokens or knobs.max_tokens,
        "temperature": knobs.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt" if is_text else "messages": content,
    }
    return LoadRequest(label, COMPLETIONS if is_text else CHAT, body)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def all_users(share: float, users: int) -> int:
    """The number of users after this share of the time: always all."""
    return users


def burst(share: float, users: int) -> int:
    """One user, then all users, each for a sixth of the time, three times."""
    return 1 if int(share * 6) % 2 == 0 else users


def ramp(share: float, users: int) -> int:
    """More users step by step, up to all of them, in at most eight steps of equal length."""
    steps = min(users, 8)
    return max(1, round(users * (int(share * steps) + 1) / steps))


@dataclass(frozen=True)
class Scenario:
    """One way to load a gateway."""

    summary: str
    make: Make
    users: int = 4
    duration_s: float = 30.0
    shape: Callable[[float, int], int] = all_users
    """(share of the time that has passed, users at the peak) -> users now."""


SCENARIOS: dict[str, Scenario] = {
    "chat": Scenario("chat completions, streamed", chat),
    "mixed": Scenario("both endpoints, short and long prompts and answers", mixed),
    "multiturn": Scenario("conversations of four turns behind one shared system prompt", multiturn),
    "domain-shift": Scenario("code for the first half of the time, then prose", domain_shift),
    "burst": Scenario("one user, and all of them in bursts", completion, users=16, shape=burst),
    "ramp": Scenario("more users step by step", completion, users=16, duration_s=60.0, shape=ramp),
}
