"""The scenarios: what their users ask.  Pure, but reads the prompts' source from files.

A workload is a generator: it yields a `LoadRequest`, is sent the answer's text, and yields the next one.  It never ends by
itself.  All its choices come from its own `random.Random`.  So the same seed gives the same requests, whatever the server
answers, unless an answer is part of the next request (`multiturn`).

There are two domains of prompts, which every machine with Python has: `code` is the standard library's source, `prose` the help
on Python's language.
"""

import math
import random
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal, NamedTuple

Domain = Literal["code", "prose"]
CHARACTERS_PER_TOKEN = 3.0
"""An estimate."""


class LoadRequest(NamedTuple):
    """One request to make."""

    label: str
    path: str
    body: dict[str, Any]


Workload = Generator[LoadRequest, str, None]
Make = Callable[[Namespace, random.Random, Callable[[], float]], Workload]
"""(Locust's options, chance, the share of the load's time that has passed) -> workload."""


def chat(options: Namespace, chance: random.Random, share: Callable[[], float]) -> Workload:
    """Chat completions with prompts of one length."""
    while True:
        yield _request(options, "chat", _user(prompt("code", options.prompt_tokens, chance)))


def mixed(options: Namespace, chance: random.Random, share: Callable[[], float]) -> Workload:
    """Both endpoints; prompts of 1/16 to 4 times the given length, answers of 1/8 to 2 times, log-uniform."""
    while True:
        text = prompt("code", log_uniform(options.prompt_tokens / 16, options.prompt_tokens * 4, chance), chance)
        limit = log_uniform(options.max_tokens / 8, options.max_tokens * 2, chance)
        size = "short" if limit <= options.max_tokens / 2 else "long"
        if chance.random() < 0.5:
            yield _request(options, f"chat {size}", _user(text), limit)
        else:
            yield _request(options, f"completion {size}", text, limit)


def multiturn(options: Namespace, chance: random.Random, share: Callable[[], float]) -> Workload:
    """Conversations of four turns after one long system prompt that all users share."""
    shared = {"role": "system", "content": prompt("prose", options.prompt_tokens * 2, random.Random(options.seed))}
    while True:
        messages = [shared]
        for turn in range(1, 5):
            messages = messages + _user(prompt("code", options.prompt_tokens // 4, chance))
            text = yield _request(options, f"turn {turn}", messages)
            messages = [*messages, {"role": "assistant", "content": text}]


def domain_shift(options: Namespace, chance: random.Random, share: Callable[[], float]) -> Workload:
    """Code in the first half of the time, prose in the second."""
    while True:
        domain: Domain = "code" if share() < 0.5 else "prose"
        yield _request(options, domain, prompt(domain, options.prompt_tokens, chance))


@cache
def text_of(domain: Domain) -> str:
    """All text of a domain."""
    if domain == "prose":
        return "\n".join(topics.values())
    return "\n".join(path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))


def prompt(domain: Domain, tokens: int, chance: random.Random) -> str:
    """About `tokens` tokens of a domain, from the beginning of a random line on."""
    text = text_of(domain)
    length = max(8, round(tokens * CHARACTERS_PER_TOKEN))
    at = text.find("\n", chance.randrange(max(1, len(text) - 2 * length))) + 1
    return text[at : at + length]


def log_uniform(low: float, high: float, chance: random.Random) -> int:
    """A whole number between `low` and `high`, at least 1, whose logarithm is uniform."""
    return max(1, round(math.exp(chance.uniform(math.log(max(low, 1)), math.log(max(high, 1))))))


def _request(options: Namespace, label: str, content: str | list[dict[str, str]], limit: int | None = None) -> LoadRequest:
    """A streamed completion of a text, or a chat after messages."""
    name, path = ("prompt", "/v1/completions") if isinstance(content, str) else ("messages", "/v1/chat/completions")
    body = {
        "model": options.model,
        "max_tokens": limit or options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        name: content,
    }
    return LoadRequest(label, path, body)


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


SCENARIOS: dict[str, Make] = {"chat": chat, "mixed": mixed, "multiturn": multiturn, "domain-shift": domain_shift}
