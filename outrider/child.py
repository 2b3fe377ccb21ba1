"""Runs `outrider ...`, and ends it as Ctrl-C would when its standard input closes, because then its parent has ended."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def end_with_parent() -> None:
    """Waits until the parent has ended, then sends SIGINT to this process."""
    # Not `sys.stdin`, whose lock would still be held when the interpreter ends.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv[0] = "outrider"
    runpy.run_module("gateway.cli", run_name="__main__", alter_sys=True)
