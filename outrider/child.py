"""`outrider ...`, ended as with Ctrl-C when its standard input closes, however the process that started it ends."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def end_with_parent() -> None:
    """Returns when the parent has ended."""
    # Not `sys.stdin`: its lock would be held at the interpreter's end.
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv[0] = "outrider"
    runpy.run_module("gateway.cli", run_name="__main__", alter_sys=True)
