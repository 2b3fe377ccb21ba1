"""Times, tokens and outcome of one streamed answer.  Pure: the clock's readings are passed in.

    TTFT          first token - start
    inter-chunk   between two chunks that carry tokens
    TPOT          (last token - first token) / (n - 1)
    TGS decode    (n - 1) / (last token - first token)
    TGS e2e       n / (last token - start)

`n` is the server's own count, from the `usage` that it sends last.  The gateway has the same definitions, but measures at its
own end of the connection.  A chunk counts as carrying tokens when it has text, reasoning, tool calls or a finish reason.  A
chunk with only the role does not count: the server sends it before the first token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["ok", "aborted", "rejected", "failed"]
"""`aborted`: by the client, on purpose; `rejected`: 429 or 503 with Retry-After, as an overloaded server should answer."""

DONE = "[DONE]"
_CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


@dataclass
class Answer:
    """One request and its answer.  Times are readings of one monotonic clock, in seconds."""

    label: str
    """The kind of request."""
    user: int
    number: int
    """Index among the user's requests; with the same seed, another run has the same request under it."""
    started: float
    outcome: Outcome = "failed"
    reason: str = ""
    """Why the request failed; empty otherwise."""
    status: int = 0
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens arrived."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens generated, by the server's count."""
    finish_reason: str = ""
    size: int = 0
    """Bytes of the body."""
    text: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.chunks[0] - self.started if self.chunks else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        spent = self._decoding_s
        return spent / (self.tokens - 1) if spent else None

    @property
    def tgs(self) -> float | None:
        """Tokens per second while decoding."""
        spent = self._decoding_s
        return (self.tokens - 1) / spent if spent else None

    @property
    def tgs_e2e(self) -> float | None:
        """Tokens per second from the start."""
        if not self.chunks or not self.tokens or self.chunks[-1] <= self.started:
            return None
        return self.tokens / (self.chunks[-1] - self.started)

    @property
    def _decoding_s(self) -> float | None:
        """Seconds from the first to the last token; None if there is only one token, or all tokens came in one chunk."""
        if len(self.chunks) < 2 or self.tokens < 2:
            return None
        return self.chunks[-1] - self.chunks[0] or None


class StreamReader:
    """Follows the events of one stream and fills in its `Answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._text: list[str] = []
        self._usage = False
        self.done = False
        """Whether `[DONE]` has arrived."""

    def take(self, events: Iterable[str], now: float) -> None:
        """Takes the data of events that arrived at `now`.  The first fault found becomes the answer's reason."""
        for event in events:
            if self.done:
                self._fail("data after [DONE]")
            elif event == DONE:
                self.done = True
            else:
                self._take_json(event, now)

    def end(self, now: float, broken: str = "") -> Answer:
        """Ends the answer after its stream; `broken` describes a fault of the connection."""
        answer = self.answer
        answer.ended = now
        answer.text = "".join(self._text)
        if broken:
            self._fail(broken)
        elif not self.done:
            self._fail("no [DONE]")
        elif not answer.chunks:
            self._fail("no tokens")
        elif not answer.finish_reason:
            self._fail("no finish_reason")
        elif not self._usage:
            self._fail("no usage")
        if not answer.reason:
            answer.outcome = "ok"
        return answer

    def abort(self, now: float) -> Answer:
        """Ends the answer after the client has left the stream on purpose."""
        self.answer.ended = now
        self.answer.text = "".join(self._text)
        if not self.answer.reason:
            self.answer.outcome = "aborted"
        return self.answer

    def _fail(self, reason: str) -> None:
        self.answer.outcome = "failed"
        self.answer.reason = self.answer.reason or reason

    def _take_json(self, data: str, now: float) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self._fail("an event that is no JSON object")
            return
        if "error" in chunk:
            self._fail(f"error event: {error_code(chunk)}")
            return
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = True
            self.answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.answer.tokens = int(usage.get("completion_tokens") or 0)
        carries = False
        for choice in chunk.get("choices") or ():
            carries |= self._take_choice(choice)
        if carries:
            self.answer.chunks.append(now)

    def _take_choice(self, choice: Mapping[str, Any]) -> bool:
        """Takes the text of one choice; returns whether the choice carries tokens."""
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if text:
            self._text.append(text)
        if choice.get("finish_reason"):
            self.answer.finish_reason = choice["finish_reason"]
            return True
        return bool(text) or any(delta.get(name) for name in _CONTENT)


def error_code(body: Any) -> str:
    """The code or type of an OpenAI error object; never its message, which may quote the request."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return "not an OpenAI error"
    return str(error.get("code") or error.get("type") or "without code")


def is_clean_error(body: Any) -> bool:
    """Whether this is an OpenAI error object, with all four of its fields."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return (
        isinstance(error, Mapping)
        and set(error) == {"message", "type", "param", "code"}
        and bool(error["message"])
        and isinstance(error["type"], str)
        and isinstance(error["code"], str | None)
    )
