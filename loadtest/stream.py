"""Times, tokens and faults of one streamed answer.  Pure: the clock's readings are passed in.

    TTFT    first token - start
    TPOT    (last token - first token) / (n - 1)
    TGS     (n - 1) / (last token - first token)

`n` is the server's own count, from the `usage` that it sends last.  The gateway has the same definitions, but measures at its
own end of the connection.  A chunk counts as carrying tokens when it has text, reasoning, tool calls or a finish reason.  A
chunk with only the role does not count: the server sends it before the first token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"
AT_ONCE_S = 0.001
"""Tokens that arrive within this time have no rate: it would be that of this process' own reading."""
_CONTENT = ("content", "reasoning", "reasoning_content", "tool_calls", "refusal")


@dataclass
class StreamedAnswer:
    """One answer, as far as it has arrived.  Times are readings of one monotonic clock, in seconds."""

    started: float
    ended: float = 0.0
    fault: str = ""
    """The first fault; empty if the answer is complete."""
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens arrived."""
    tokens: int = 0
    """Tokens generated, by the server's count."""
    size: int = 0
    """Bytes of the body."""
    text: str = ""
    _rest: bytes = b""
    """An event that has not arrived completely."""
    _done: bool = False
    _finished: bool = False

    def feed(self, received: bytes, now: float) -> None:
        """Takes bytes that arrived at `now`, cut anywhere.  An event has arrived when its blank line has."""
        self.size += len(received)
        *events, self._rest = (self._rest + received).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
            if not data:
                continue
            if self._done:
                self.fail("data after [DONE]")
            elif data == DONE:
                self._done = True
            else:
                self._take(data, now)

    def end(self, now: float) -> None:
        """Ends the answer, and finds out whether anything is missing."""
        self.ended = now
        parts = {"[DONE]": self._done, "tokens": self.chunks, "finish_reason": self._finished, "usage": self.tokens}
        for name, there in parts.items():
            if not there:
                self.fail(f"no {name}")
        if self._rest.strip():
            self.fail("an unfinished event")

    def fail(self, fault: str) -> None:
        self.fault = self.fault or fault

    def figures(self) -> dict[str, float]:
        """What is measured of a complete answer, by kind of row in Locust's tables; times in ms."""
        found = {"tokens": float(self.tokens), "TTFT": (self.chunks[0] - self.started) * 1000}
        spent = self.chunks[-1] - self.chunks[0]
        if self.tokens > 1 and spent > AT_ONCE_S:
            found |= {"TPOT": spent / (self.tokens - 1) * 1000, "TGS tok/s": (self.tokens - 1) / spent}
        return found

    def _take(self, data: bytes, now: float) -> None:
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.fail(f"error event: {error_code(chunk)}")
                return
            self.tokens = int((chunk.get("usage") or {}).get("completion_tokens") or self.tokens)
            carry = [self._take_choice(choice) for choice in chunk.get("choices") or ()]
        except (TypeError, ValueError, AttributeError):
            self.fail("an event of another shape")
        else:
            if any(carry):
                self.chunks.append(now)

    def _take_choice(self, choice: Mapping[str, Any]) -> bool:
        """Takes the text of one choice; returns whether the choice carries tokens."""
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        self.text += text
        self._finished |= bool(choice.get("finish_reason"))
        return bool(text or choice.get("finish_reason")) or any(delta.get(name) for name in _CONTENT)


def error_code(body: Any) -> str:
    """The code or type of an OpenAI error object; never its message, which may quote the request."""
    error = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(error, Mapping):
        return "not an OpenAI error"
    return str(error.get("code") or error.get("type") or "without code")
