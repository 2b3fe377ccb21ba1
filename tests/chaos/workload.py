"""Requests of every kind, what a client is told of each, and whether that is right."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SCHEMA = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "minItems": 24, "maxItems": 24},
        "count": {"enum": [1, 2, 3]},
    },
    "required": ["items", "count"],
    "additionalProperties": False,
}
PROMPTS = (
    "def add(a, b):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n",
    "for line in open(path):\n",
    "def main(argv=None):\n    parser = ",
    "try:\n    import json\nexcept ImportError:\n",
)
NOWHERE = frozenset({"no_verifier_ready", "verifier_lost"})
"""Errors of a request for which no verifier was there in time."""


@dataclass(frozen=True)
class Case:
    """One kind of request."""

    name: str
    body: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"

    @property
    def exact(self) -> bool:
        """Whether an undisturbed run says what must come out."""
        return self.body.get("temperature") == 0 or "seed" in self.body


def cases(tokens: int) -> list[Case]:
    """Every kind with every prompt; the longest emit `tokens` tokens."""
    base = {"model": "demo", "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    streamed = base | {"stream": True, "stream_options": {"include_usage": True}}
    made: list[Case] = []
    for prompt in PROMPTS:
        text, chat = {"prompt": prompt}, {"messages": [{"role": "user", "content": prompt}]}
        structured = {"ignore_eos": False, "structured_outputs": {"json": SCHEMA}}
        penalties = {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
        made += [
            Case("greedy", streamed | text),
            Case("whole", base | text),
            Case("penalties", streamed | text | penalties),
            Case("stop strings", streamed | text | {"stop": ["\n\n\n", "return self."]}),
            Case("json schema", streamed | text | structured),
            Case("logprobs", streamed | text | {"logprobs": 2}),
            Case("n = 3", streamed | text | {"n": 3, "temperature": 1.0, "seed": 11}),
            Case("chat", streamed | chat),
            Case("sampled", streamed | text | {"temperature": 0.8, "top_p": 0.95}),
            Case("seeded", streamed | chat | {"temperature": 0.8, "seed": 7}),
            Case("sampled json", streamed | text | structured | {"temperature": 0.8, "seed": 13}),
        ]
    return made


@dataclass
class SequenceStatistics:
    """What a client was told of one index of one request."""

    text: str = ""
    finish: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """One request from its client's side."""

    case: Case
    received: dict[int, SequenceStatistics] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    abandoned: bool = False
    """The client left on purpose."""

    @property
    def nowhere_to_go(self) -> bool:
        """It failed because no verifier was there in time."""
        return bool(self.errors) and all(error.get("code") in NOWHERE for error in self.errors)


async def ask(http: httpx.AsyncClient, outcome: Outcome) -> None:
    """Sends the request and notes what comes."""
    case = outcome.case
    try:
        async with http.stream("POST", case.path, json=case.body) as answer:
            if answer.status_code != 200 or not case.body.get("stream"):
                _hear(outcome, json.loads(await answer.aread()))
                outcome.done = answer.status_code == 200
                return
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    outcome.done = True
                elif line.startswith("data: "):
                    _hear(outcome, json.loads(line[6:]))
    except httpx.HTTPError as error:
        outcome.errors.append({"code": "connection", "message": type(error).__name__})


def _hear(outcome: Outcome, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        outcome.errors.append(chunk["error"])
        return
    outcome.usage = chunk.get("usage") or outcome.usage
    for choice in chunk.get("choices", []):
        received = outcome.received.setdefault(choice["index"], SequenceStatistics())
        message = choice.get("delta") or choice.get("message") or {}
        received.text += choice.get("text") or message.get("content") or ""
        if choice.get("finish_reason"):
            received.finish.append(choice["finish_reason"])
        logprobs = choice.get("logprobs") or {}
        received.tokens += logprobs.get("tokens") or []
        received.logprobs += logprobs.get("token_logprobs") or []


def what_is_wrong(outcome: Outcome, reference: Outcome | None) -> str | None:
    """Why an answer that came without an error is not what it should be; None when it is."""
    if not outcome.done:
        return "the stream ended without [DONE]"
    for received in outcome.received.values():
        if len(received.finish) != 1:
            return f"{len(received.finish)} finish reasons"
    if len(outcome.received) != outcome.case.body.get("n", 1):
        return "indices are missing"
    if reference is None:
        usage, tokens = outcome.usage or {}, outcome.case.body["max_tokens"]
        return None if usage.get("completion_tokens") == tokens else f"usage {usage} for {tokens} tokens"
    for index, wanted in reference.received.items():
        got = outcome.received[index]
        if got.text != wanted.text:
            same = next((i for i, (a, b) in enumerate(zip(got.text, wanted.text, strict=False)) if a != b), "the end")
            return f"other text from character {same} on ({len(got.text)} and {len(wanted.text)} characters)"
        if (got.finish, got.tokens) != (wanted.finish, wanted.tokens):
            return "other finish reason or other tokens"
        # Prefill and decoding round differently.
        if any(abs(a - b) > 0.01 for a, b in zip(got.logprobs, wanted.logprobs, strict=True)):
            return "other log-probabilities"
    return None if outcome.usage == reference.usage else f"usage {outcome.usage}, not {reference.usage}"


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that ended with an error although a verifier was there."""
    return [each for each in outcomes if each.errors and not each.abandoned and not each.nowhere_to_go]
