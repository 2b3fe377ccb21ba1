"""Shows a round's progress on stderr: a bar that is redrawn on a terminal, elsewhere a line every 15 s.  Main thread."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

WIDTH = 24
REDRAW_S = 0.2
LINE_S = 15.0
CLEAR_TO_END = "\x1b[K"


class Bar:
    """Progress of `total` requests.  `show` may be called often: it draws only when a drawing is due."""

    def __init__(self, stream: TextIO, title: str, total: int) -> None:
        self._stream = stream
        self._title = title
        self._total = total
        self._redraws = stream.isatty()
        self._began = time.monotonic()
        self._next = self._began + (0.0 if self._redraws else LINE_S)

    @property
    def is_due(self) -> bool:
        """Whether `show` would draw now."""
        return time.monotonic() >= self._next

    def show(self, done: int, tokens: int) -> None:
        """Draws, if due, that `done` requests are complete and `tokens` tokens have arrived."""
        if self.is_due:
            self._next = time.monotonic() + (REDRAW_S if self._redraws else LINE_S)
            self._draw(done, tokens, "" if self._redraws else "\n")

    def end(self, done: int, tokens: int) -> None:
        """Draws the final state, and ends the line."""
        self._draw(done, tokens, "\n")

    def _draw(self, done: int, tokens: int, after: str) -> None:
        seconds = time.monotonic() - self._began
        filled = WIDTH * done // self._total
        clock = f"{int(seconds) // 60}:{int(seconds) % 60:02}"
        line = (
            f"{self._title} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{self._total} requests, "
            f"{tokens} tokens, {tokens / max(seconds, 1e-9):.0f} tok/s, {clock}"
        )
        if self._redraws:
            # A line that wraps could not be overwritten.
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + CLEAR_TO_END
        self._stream.write(line + after)
        self._stream.flush()
