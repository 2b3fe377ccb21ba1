"""How a command ends: with which status, and on SIGINT and SIGTERM.  The command line's process, main thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class Interrupted(BaseException):
    """SIGINT or SIGTERM; not an `Exception`, so that nothing on the way takes it for an error of its own."""


class Forced:
    """Whether one more signal ends the process."""

    armed = False


@contextmanager
def signals() -> Iterator[Forced]:
    """The first SIGINT or SIGTERM ends the block with `Interrupted`; one more, while it is ending, ends the process."""
    state = Forced()

    def handle(number: int, frame: Any) -> None:
        if not state.armed:
            state.armed = True
            raise Interrupted
        print("outrider: stopped at once", file=sys.stderr)
        # Ray's processes die with their parent; the next start removes the files.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    before = {each: signal.signal(each, handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
