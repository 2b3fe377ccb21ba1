"""Decides which worker runs which request.  Pure.

The longest waiting request goes to the worker with the fewest expected tokens.  So the requests left for the end of the round
are short.  If lengths are not known, all are expected to be equal, and the least loaded worker has the fewest requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def assign(waiting: list[tuple[int, int]], running: Mapping[str, Sequence[int]], window: int) -> list[tuple[int, str]]:
    """Takes requests out of `waiting`; returns pairs of request and worker to send now.

    `waiting` is a heap of (-expected tokens, request).  `running` has the expected tokens of each running request, by worker.
    At most `window` requests run on one worker.
    """
    loads = {worker: (sum(tokens), len(tokens)) for worker, tokens in running.items()}
    sent = []
    while waiting and (free := [worker for worker, (_, requests) in loads.items() if requests < window]):
        worker = min(free, key=lambda each: (loads[each][0], each))
        minus_tokens, request = heapq.heappop(waiting)
        tokens, requests = loads[worker]
        loads[worker] = tokens - minus_tokens, requests + 1
        sent.append((request, worker))
    return sent
