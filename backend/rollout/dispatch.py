"""Decides which worker runs which request.  Pure: the round reports events and asks what to send where.

The longest waiting request goes to the worker with the fewest expected tokens, at most `window` requests on a worker at a time.
So the requests left for the end of the round are short.  If lengths are not known, all are expected to be equal, and the least
loaded worker is the one with the fewest requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Dispatcher:
    """Assigns the requests of one round, which are named by their index in `expected` (expected response tokens of each).

    A request is waiting, running on one worker, or done.  When a worker leaves, its requests wait again, with the expected
    tokens that `expect` set last.
    """

    def __init__(self, expected: Sequence[int], window: int) -> None:
        self._expected = list(expected)
        self._window = window
        self._waiting = [(-tokens, request) for request, tokens in enumerate(self._expected)]
        heapq.heapify(self._waiting)
        self._running: dict[str, set[int]] = {}
        self.unfinished = len(self._expected)
        """Number of requests that are not done."""

    def join(self, worker: str) -> None:
        """Adds a worker, which gets requests from now on."""
        self._running[worker] = set()

    def leave(self, worker: str) -> list[int]:
        """Removes a worker that is gone.  Its requests wait again, and are returned."""
        lost = sorted(self._running.pop(worker))
        for request in lost:
            self._wait(request)
        return lost

    def assign(self) -> list[tuple[int, str]]:
        """Pairs of request and worker to send now."""
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
        """Sets how many tokens of a response are still expected."""
        self._expected[request] = tokens

    def done(self, request: int, worker: str) -> None:
        """Notes that a request's last token has arrived: its worker has room for another request."""
        self._running[worker].remove(request)
        self.unfinished -= 1

    def again(self, request: int, worker: str) -> None:
        """Puts a request that its worker has aborted back among the waiting ones."""
        self._running[worker].remove(request)
        self._wait(request)

    def load(self, worker: str) -> int:
        """Response tokens expected of a worker's running requests."""
        return sum(self._expected[request] for request in self._running[worker])

    def _wait(self, request: int) -> None:
        heapq.heappush(self._waiting, (-self._expected[request], request))
