"""Makes steps and draft passes last as long as a stated accelerator would take.  Child processes of `outrider bench --pace`.

The model really runs; then the thread sleeps until the stated device would be done (for the target: `paced_worker.py`).
"""

import time
from collections.abc import Callable
from typing import Any

from backend.lab.bench.pace import Pace, Paced


class Pacer:
    """Stretches each pass to the time that a stated device takes.  One thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self.counts = Paced()
        self._clock, self._sleep = clock, sleep
        self._begin = self._end = 0.0
        self._late_s = 0.0
        """How late the last sleep ended.  The next pass is made shorter by as much, so that the sum of times is as stated."""

    def launch(self, seconds: float) -> None:
        """Begins a pass that takes the stated device `seconds`."""
        self._begin = self._end = self._clock() - self._late_s
        self.counts.passes += 1
        self.extend(seconds)

    def extend(self, seconds: float) -> None:
        """Adds `seconds` of the stated device to the current pass."""
        self._end += seconds
        self.counts.paced_s += seconds

    def finish(self) -> None:
        """Ends a pass: sleeps until the stated device would be done, or counts an overrun, if any time was stated."""
        left_s = self._end - self._clock()
        if left_s >= 0:
            self._sleep(left_s)
            self._late_s = max(self._clock() - self._end, 0.0)
        else:
            self._late_s = 0.0
            if self._end > self._begin:
                self.counts.overruns += 1
                self.counts.overrun_s -= left_s


def pace_drafter(pace: Pace) -> Pacer:
    """Paces the drafter's head in this process; call before it is built.

    The choice of a token belongs to the pass that it follows, as in `LAUNCH_MS` and in mode `native`.
    """
    from backend.drafter.decoding import DecodeBatch
    from backend.drafter.dflash import BlockHead
    from backend.drafter.head import Head

    pacer, cost = Pacer(), pace.drafter
    forward, store, pick, advance_and_pick = Head.forward, BlockHead.store, DecodeBatch.pick, DecodeBatch.advance_and_pick
    chooses = False

    def paced_forward(head: Head, rows: Any, *args: Any, **kwargs: Any) -> Any:
        pacer.launch((cost.block if isinstance(head, BlockHead) else cost.token).seconds(len(rows.ids)))
        output = forward(head, rows, *args, **kwargs)
        if not chooses:
            pacer.finish()
        return output

    def paced_pick(batch: DecodeBatch) -> None:
        if not chooses:
            pacer.launch(cost.first.seconds(0))
        if batch.rules.independent:
            pacer.extend(cost.draw.seconds(batch.count))
        pick(batch)
        pacer.finish()

    def paced_advance(batch: DecodeBatch) -> None:
        nonlocal chooses
        chooses = True
        advance_and_pick(batch)
        chooses = False

    def paced_store(head: BlockHead, positions: Any, *args: Any) -> None:
        pacer.launch(cost.store.seconds(len(positions)))
        store(head, positions, *args)
        pacer.finish()

    for owner, name, paced in (
        (Head, "forward", paced_forward),
        (DecodeBatch, "pick", paced_pick),
        (DecodeBatch, "advance_and_pick", paced_advance),
        (BlockHead, "store", paced_store),
    ):
        setattr(owner, name, paced)
    return pacer
