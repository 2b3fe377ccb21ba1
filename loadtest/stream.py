"""Reads one streamed answer, and finds what is wrong with one.  Pure: lines and a clock are passed in.

    TTFT    first token - start
    TPOT    (last token - first token) / (n - 1)
    TGS     (n - 1) / (last token - first token)

`n` is the server's own count, from the `usage` that it sends last.  The gateway has the same definitions, but measures at its
own end of the connection.  A chunk counts as carrying tokens when it has text, reasoning, tool calls or a finish reason.  A
chunk with only the role does not count: the server sends it before the first token.
"""

import json
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

REJECTED = "rejected: "
"""How the fault of a request begins that an overloaded server has refused properly, with Retry-After."""
AT_ONCE_S = 0.001
"""Tokens that arrive within this time have no rate: it would be that of this process' own reading."""
CONTENT = ("text", "content", "reasoning", "reasoning_content", "tool_calls", "refusal")


class IncompleteAnswer(Exception):
    """What is wrong with an answer."""


@dataclass
class StreamedAnswer:
    """One answer, as far as it has arrived."""

    text: str = ""
    tokens: int = 0
    """Tokens generated, by the server's count."""
    size: int = 0
    """Bytes of the body."""
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens arrived, in seconds."""

    def figures(self, started: float) -> dict[str, float]:
        """What is measured of a complete answer, by kind of row in Locust's tables; times in ms."""
        found = {"tokens": float(self.tokens), "TTFT": (self.chunks[0] - started) * 1000}
        spent = self.chunks[-1] - self.chunks[0]
        if self.tokens > 1 and spent > AT_ONCE_S:
            found |= {"TPOT": spent / (self.tokens - 1) * 1000, "TGS tok/s": (self.tokens - 1) / spent}
        return found


def read(lines: Iterable[bytes], clock: Callable[[], float]) -> StreamedAnswer:
    """Reads a stream to its end; a line has arrived when `lines` yields it.  Raises `IncompleteAnswer`."""
    answer, done, finished = StreamedAnswer(), False, False
    for line in lines:
        now = clock()
        answer.size += len(line)
        if not line.startswith(b"data:"):
            continue
        if done:
            raise IncompleteAnswer("data after [DONE]")
        if (data := line[5:].strip()) == b"[DONE]":
            done = True
            continue
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise IncompleteAnswer(f"error event: {error_code(chunk)}")
            answer.tokens = int((chunk.get("usage") or {}).get("completion_tokens") or answer.tokens)
            for choice in chunk.get("choices") or ():
                piece = choice.get("delta") or choice
                answer.text += piece.get("text") or piece.get("content") or ""
                finished |= bool(choice.get("finish_reason"))
                if choice.get("finish_reason") or any(piece.get(name) for name in CONTENT):
                    answer.chunks.append(now)
        except (TypeError, ValueError, AttributeError):
            raise IncompleteAnswer("an event of another shape") from None
    for part, there in {"[DONE]": done, "tokens": answer.chunks, "finish_reason": finished, "usage": answer.tokens}.items():
        if not there:
            raise IncompleteAnswer(f"no {part}")
    return answer


def refusal(status: int, headers: Container[str], body: bytes) -> str:
    """What is wrong with an answer whose status is not 200."""
    try:
        error = json.loads(body)
    except ValueError:
        error = None
    return f"{REJECTED if status in (429, 503) and 'retry-after' in headers else ''}{status} {error_code(error)}"


def error_code(body: Any) -> str:
    """The code or type of an OpenAI error object; never its message, which may quote the request."""
    match body:
        case {"error": {"code": str() | int() as code}} | {"error": {"type": str(code)}}:
            return str(code)
        case _:
            return "not an OpenAI error"
