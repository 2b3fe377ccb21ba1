"""Who runs which request.  Pure: the round tells what happened and asks what to send where.

Longest first, to the worker with the least left to do, at most `window` requests on a worker at a time: what is left for the
end is short.  Where lengths are not known they are all the same, and the least loaded worker is that with the fewest requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Dispatcher:
    """The requests of one round, by their place in `expected` (response tokens each is expected to take).

    A request waits, runs on one worker, has ended there (and is no load any more), or is done.  Until it is done it belongs to
    its worker: it waits again when that worker leaves, with as much to do as `expect` said last.
    """

    def __init__(self, expected: Sequence[int], window: int) -> None:
        self._expected = list(expected)
        self._window = window
        self._waiting = [(-tokens, request) for request, tokens in enumerate(self._expected)]
        heapq.heapify(self._waiting)
        self._running: dict[str, set[int]] = {}
        self._ended: dict[str, set[int]] = {}
        self.unfinished = len(self._expected)
        """Requests that are not done."""

    def join(self, worker: str) -> None:
        """A worker takes requests from now on."""
        self._running[worker] = set()
        self._ended[worker] = set()

    def leave(self, worker: str) -> list[int]:
        """A worker is gone; what belonged to it waits again, and is returned."""
        lost = sorted(self._running.pop(worker) | self._ended.pop(worker))
        for request in lost:
            self._wait(request)
        return lost

    def assign(self) -> list[tuple[int, str]]:
        """What to send where, now."""
        sent = []
        loads = {worker: self.load(worker) for worker in self._running}
        while self._waiting:
            free = [worker for worker, running in self._running.items() if len(running) < self._window]
            if not free:
                break
            worker = min(free, key=lambda each: (loads[each], each))
            request = heapq.heappop(self._waiting)[1]
            self._running[worker].add(request)
            loads[worker] += self._expected[request]
            sent.append((request, worker))
        return sent

    def expect(self, request: int, tokens: int) -> None:
        """So many tokens of a response are left."""
        self._expected[request] = tokens

    def move(self, request: int, source: str, target: str) -> None:
        """A running request goes on at another worker."""
        self._running[source].remove(request)
        self._running[target].add(request)

    def ended(self, request: int, worker: str) -> None:
        """The last token of a request has come; its worker has room for another."""
        self._running[worker].remove(request)
        self._ended[worker].add(request)

    def done(self, request: int, worker: str) -> None:
        """Everything there is to know of an ended request is here."""
        self._ended[worker].remove(request)
        self.unfinished -= 1

    def again(self, request: int, worker: str) -> None:
        """A worker gave a request up; it waits again."""
        self._running[worker].remove(request)
        self._wait(request)

    def load(self, worker: str) -> int:
        """Response tokens expected of a worker's running requests."""
        return sum(self._expected[request] for request in self._running[worker])

    def _wait(self, request: int) -> None:
        heapq.heappush(self._waiting, (-self._expected[request], request))
