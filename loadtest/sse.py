"""Parses server-sent events from bytes, as the HTML standard defines them.  Pure.

Bytes may be split anywhere: inside a character, a line or a CRLF.  An event counts as arrived when its blank line has arrived.
An event that is unfinished when the stream ends is no event.
"""

from __future__ import annotations

import codecs


class SseParser:
    """Bytes in, the events' data out."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._after_cr = False
        self._text = ""

    def feed(self, received: bytes) -> list[str]:
        """The data of the events that `received` completes.  Raises `UnicodeDecodeError` on what is not UTF-8."""
        text = self._decoder.decode(received)
        if not text:
            return []
        # The LF of a CRLF that was split is dropped: its CR has already ended the line.
        rest = text.removeprefix("\n") if self._after_cr else text
        self._after_cr = text.endswith("\r")
        self._text += rest.replace("\r\n", "\n").replace("\r", "\n")
        *blocks, self._text = self._text.split("\n\n")
        return ["\n".join(lines) for block in blocks if (lines := _data(block))]

    @property
    def unfinished(self) -> bool:
        """Whether bytes of an unfinished event have arrived."""
        return bool(self._text.strip("\n"))


def _data(block: str) -> list[str]:
    """The values of the fields named `data`, without other fields and comments, whose name is empty."""
    fields = (line.partition(":") for line in block.split("\n"))
    return [value.removeprefix(" ") for name, _, value in fields if name == "data"]
