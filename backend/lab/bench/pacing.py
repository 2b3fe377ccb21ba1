"""Makes steps and draft passes last as long as a stated accelerator would take.  Child processes of `outrider bench --pace`.

The model really runs; then the thread sleeps until the device it stands for would be done (`paced_worker.py` for the target).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from backend.lab.bench.pace import Pace, Paced


class Pacer:
    """The time a stated device takes, pass by pass.  One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.counts = Paced()
        self._clock, self._sleep = clock, sleep
        self._end = 0.0
        self._late_s = 0.0
        """Sleep ends a little late; the next pass is so much shorter, so that their sum is as stated."""

    def launch(self, seconds: float) -> None:
        """A pass begins that the device takes so long for."""
        self._end = self._clock() - self._late_s
        self.counts.passes += 1
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """The device has more to do before this pass is over."""
        self._end += seconds
        self.counts.paced_s += seconds

    def finish(self) -> None:
        """This machine is done with the pass; sleeps until the device would be."""
        left_s = self._end - self._clock()
        if left_s >= 0:
            self._sleep(left_s)
            self._late_s = max(self._clock() - self._end, 0.0)
        else:
            self._late_s = 0.0
            self.counts.overruns += 1
            self.counts.overrun_s -= left_s


def pace_verifier(pace: Pace) -> Pacer:
    """Call before the verifier is built; its worker has to be `paced_worker.PacedCpuWorker`."""
    from backend.lab.bench.paced_worker import PacedCpuWorker

    PacedCpuWorker.pace, PacedCpuWorker.pacer = pace, Pacer()
    return PacedCpuWorker.pacer


def pace_drafter(pace: Pace) -> Pacer:
    """Call before the drafter is built: choosing a token after each pass of its head takes as long as it does here."""
    from backend.drafter.head import Head

    pacer, forward = Pacer(), Head.forward

    def paced_forward(head: Head, rows: Any, *args: Any, **kwargs: Any) -> Any:
        pacer.launch(pace.drafter.seconds(len(rows.ids)))
        output = forward(head, rows, *args, **kwargs)
        pacer.finish()
        return output

    setattr(Head, "forward", paced_forward)  # noqa: B010  (mypy: a method is not assigned to)
    return pacer
