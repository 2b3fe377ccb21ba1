"""Exit statuses of the command line, and its handling of SIGINT and SIGTERM.  The command line's process, main thread."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


@contextmanager
def signals() -> Iterator[SimpleNamespace]:
    """The first SIGINT or SIGTERM raises `KeyboardInterrupt` in the block; a second one, in the clean-up, ends the process.

    So does the first one once the block has set `armed`.
    """
    state = SimpleNamespace(armed=False)

    def handle(number: int, frame: Any) -> None:
        if not state.armed:
            state.armed = True
            # An event loop raises it again, whichever task it came in.
            raise KeyboardInterrupt
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
