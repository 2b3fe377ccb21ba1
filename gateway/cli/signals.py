"""Exit statuses of the command line, and its handling of SIGINT and SIGTERM.  The command line's process, main thread."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM was received.  An event loop raises it again, whichever task it came in."""


class Forced:
    """Whether one more signal ends the process."""

    armed = False


@contextmanager
def signals() -> Iterator[Forced]:
    """The first SIGINT or SIGTERM raises `Interrupted` in the block.  A second one, during the clean-up, ends the process."""
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
