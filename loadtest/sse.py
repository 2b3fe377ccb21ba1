"""Server-sent events from bytes, as the HTML standard defines them.  Pure.

Bytes may be cut anywhere: inside a character, a line or a CRLF.  An event is complete at its blank line and only then counts as
arrived; what is left unfinished when the stream ends was never an event.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event."""

    data: str
    event: str = "message"


class SseParser:
    """Bytes in, events out."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._begun = False
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self.comments = 0
        """Comment lines seen: keep-alives."""

    def feed(self, received: bytes) -> list[Event]:
        """The events that `received` completes.  Raises `UnicodeDecodeError` on a line that is not UTF-8."""
        events: list[Event] = []
        at = 0
        while at < len(received):
            if self._after_cr:
                self._after_cr = False
                if received[at] == 0x0A:
                    at += 1
                    continue
            end = _line_end(received, at)
            self._line += received[at : end if end >= 0 else len(received)]
            if end < 0:
                break
            self._after_cr = received[end] == 0x0D
            at = end + 1
            event = self._take_line()
            if event is not None:
                events.append(event)
        return events

    @property
    def unfinished(self) -> bool:
        """Whether something has come that no blank line has completed."""
        return bool(self._line or self._data or self._event)

    def _take_line(self) -> Event | None:
        raw = bytes(self._line)
        self._line.clear()
        if not self._begun:
            self._begun = True
            raw = raw.removeprefix(_BOM)
        if not raw:
            return self._dispatch()
        if raw.startswith(b":"):
            self.comments += 1
            return None
        name, _, value = raw.decode().partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        return None

    def _dispatch(self) -> Event | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return Event("\n".join(data), event or "message") if data else None


def _line_end(received: bytes, start: int) -> int:
    """Where the first CR or LF from `start` is; -1: nowhere."""
    lf = received.find(b"\n", start)
    cr = received.find(b"\r", start, lf if lf >= 0 else len(received))
    return cr if cr >= 0 else lf
