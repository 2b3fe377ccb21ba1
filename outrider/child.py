"""Runs `outrider ...`, and ends it as Ctrl-C would when its parent has ended; `python -m outrider.child PARENT ...`.

Then its standard input closes, unless the parent has forked: it also looks whether PARENT is its parent still.
"""

import os
import runpy
import select
import signal
import sys
import threading

LOOK_S = 1.0


def end_with_parent(parent: int) -> None:
    """Waits until the parent, a process id, has ended, then sends SIGINT to this process."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], LOOK_S)
        # Not `sys.stdin`, whose lock would still be held when the interpreter ends.
        if readable and not os.read(0, 1):
            break
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(int(sys.argv.pop(1)),), daemon=True).start()
    sys.argv[0] = "outrider"
    runpy.run_module("gateway.cli", run_name="__main__", alter_sys=True)
