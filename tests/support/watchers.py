"""Measures for how long a busy gateway's event loop stalls.  Tests only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_S = 0.05


class Stalls:
    """The longest time for which the event loop did not return to a task that only sleeps.

    Time in which this process got no CPU does not count.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[Stalls]:
        task = asyncio.ensure_future(self._watch())
        try:
            yield self
        finally:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            began, worked = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.002)
            gap = min(time.perf_counter() - began - 0.002, time.process_time() - worked)
            self.longest_s = max(self.longest_s, gap)


def attempts(timed: bool) -> Iterator[Stalls]:
    """Stalls for a test to watch, until the loop stalled for no longer than `LONGEST_S`; five times at most.

    Another process may have had our core: what is the gateway's own doing is so every time.  Only a test that is `timed` is
    judged by time.
    """
    for _ in range(5):
        stalls = Stalls()
        yield stalls
        if not timed or stalls.longest_s < LONGEST_S:
            return
    raise AssertionError(f"the loop stalled for {stalls.longest_s:.3f} s")
