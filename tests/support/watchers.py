"""Measures how responsive a busy gateway is, from outside and from inside its event loop.  Tests only."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Probe:
    """Requests `/livez` continuously from a thread of its own, over one connection, and keeps the longest time."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest_s = 0.0
        self.failures: list[str] = []

    async def __aenter__(self) -> Probe:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        # The probe may wait for an answer from this thread's event loop, so the join must not block the loop.
        await asyncio.to_thread(self._thread.join)
        self._connection.close()

    def reset(self) -> None:
        self.longest_s = 0.0

    def _run(self) -> None:
        while not self._stopping.wait(0.005):
            began = time.perf_counter()
            try:
                self._connection.request("GET", "/livez")
                answer = self._connection.getresponse()
                answer.read()
            except OSError as error:
                self.failures.append(type(error).__name__)
                return
            if answer.status != 200:
                self.failures.append(str(answer.status))
            self.longest_s = max(self.longest_s, time.perf_counter() - began)


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


def attempts(timed: bool, longest_s: float = 0.05) -> Iterator[Stalls]:
    """Stalls for a test to watch, until the loop stalled for no longer than this; five times at most.

    Another process may have had our core: what is the gateway's own doing is so every time.  Only a test that is `timed` is
    judged by time.
    """
    for _ in range(5):
        stalls = Stalls()
        yield stalls
        if not timed or stalls.longest_s < longest_s:
            return
    raise AssertionError(f"the loop stalled for {stalls.longest_s:.3f} s")
