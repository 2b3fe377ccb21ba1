"""One round of a rollout: sends the batch to the fleet and gathers answers and rows.  The command's process, its main thread.

A request is complete when its last token and its row have both come, so that tables and answers agree whatever dies meanwhile;
what a lost worker leaves incomplete starts again on the others.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.engine.client import fixed_sampling, free_sampling
from backend.records.kept import RowBatch
from backend.rollout.bar import Bar
from backend.rollout.dispatch import Dispatcher
from backend.rollout.outcome import Death, Part, Round
from backend.rollout.requests import Request
from backend.rollout.workers import Worker, Workers

POLL_S = 0.05
LOOK_S = 0.5
TEND_S = 1.0
NOBODY_S = 600.0
"""So long a round waits for a verifier when none is left; Ray is starting another."""


class RolloutError(Exception):
    """The rollout cannot go on; the message is one line."""


@dataclass(frozen=True)
class Sampling:
    """What all requests have in common."""

    temperature: float
    stops: list[int]
    seed: int | None
    """None: free responses at a temperature are not reproducible."""


@dataclass(frozen=True)
class _Sent:
    place: int
    """Of the request in the batch."""
    worker: Worker


class RoundRunner:
    """Runs one round; made anew for each."""

    def __init__(
        self, number: int, requests: Sequence[Request], workers: Workers, window: int, sampling: Sampling, bar: Bar
    ) -> None:
        self.say: Callable[[str], None] = lambda line: None
        self._round = Round(number)
        self._requests = requests
        self._workers = workers
        self._sampling = sampling
        self._bar = bar
        self._dispatcher = Dispatcher([request.expected for request in requests], window)
        self._attempts = [0] * len(requests)
        self._running: dict[str, _Sent] = {}
        self._ended: dict[str, _Sent] = {}
        self._parts: dict[Worker, Part] = {}
        self._tokens = 0
        self._began = self._next_look = self._next_tend = 0.0
        self._busy_at = 0.0

    def run(self) -> Round:
        """Returns when every request is complete.  Raises `RolloutError`."""
        self._workers.forget_rows()
        self._began = self._busy_at = time.monotonic()
        for worker in self._workers.present.values():
            self._welcome(worker)
        while self._dispatcher.unfinished:
            self._send()
            self._workers.hub.poll(POLL_S)
            self._receive()
            self._look_after(time.monotonic())
            self._show()
        self._round.wall_s = max(part.finished_s for part in self._parts.values())
        self._bar.end(len(self._requests), self._tokens)
        return self._round

    def _welcome(self, worker: Worker) -> None:
        worker.rows = RowBatch()
        part = self._parts[worker] = Part(worker.number, worker.rows)
        self._round.parts.append(part)
        self._dispatcher.join(worker.name)

    def _send(self) -> None:
        for place, name in self._dispatcher.assign():
            request, worker = self._requests[place], self._workers.present[name]
            self._attempts[place] += 1
            request_id = f"{self._round.number}-{request.case.number}-{self._attempts[place]}"
            if request.fixed is not None:
                params = fixed_sampling(request.fixed, self._sampling.temperature)
            else:
                params = free_sampling(
                    request.max_tokens, self._sampling.temperature, self._sampling.stops, self._seed(request.case.number)
                )
            worker.client.add(request.prompt, params, request_id)
            self._running[request_id] = _Sent(place, worker)

    def _seed(self, number: int) -> int | None:
        seed = self._sampling.seed
        return None if seed is None else zlib.crc32(f"{seed}/{self._round.number}/{number}".encode())

    def _receive(self) -> None:
        for worker in self._workers.present.values():
            worker.client.receive()
        for request_id, sent in list(self._running.items()):
            answer = sent.worker.client.answers[request_id]
            if answer.finish_reason is not None:
                self._end(request_id, sent)
        for worker in list(self._workers.present.values()):
            batch = worker.take_rows()
            if batch.lost:
                raise RolloutError(f"{worker.name} lost {batch.lost} rows: they came faster than they could be fetched")
            for row in batch.requests:
                if row.request_id in self._ended:
                    self._complete(row.request_id)

    def _end(self, request_id: str, sent: _Sent) -> None:
        """The last token has come, or the verifier has given the request up."""
        del self._running[request_id]
        answer = sent.worker.client.answers[request_id]
        request, where = self._requests[sent.place], sent.worker.name
        if answer.finish_reason == "abort":
            del sent.worker.client.answers[request_id]
            self._dispatcher.again(sent.place, where)
            return
        if answer.finish_reason not in ("stop", "length"):
            raise RolloutError(f"row {request.case.number}: {where} refused the request ({answer.finish_reason})")
        if request.fixed is not None and answer.tokens != request.fixed:
            raise RolloutError(f"row {request.case.number}: {where} did not keep to the response")
        self._ended[request_id] = sent
        self._dispatcher.ended(sent.place, where)

    def _complete(self, request_id: str) -> None:
        """Its row has come too."""
        sent = self._ended.pop(request_id)
        answer = sent.worker.client.answers.pop(request_id)
        number, part = self._requests[sent.place].case.number, self._parts[sent.worker]
        part.numbers[request_id] = number
        part.finished_s = max(part.finished_s, answer.last_at - self._began)
        self._round.responses[number] = answer.tokens
        self._tokens += len(answer.tokens)
        self._dispatcher.done(sent.place, sent.worker.name)

    def _look_after(self, now: float) -> None:
        if now >= self._next_tend:
            self._next_tend = now + TEND_S
            self._workers.tend()
        elif self._ended and not self._running:
            # Nothing is left but rows.
            self._workers.ask_rows()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            come, gone = self._workers.look()
            for worker, reason in gone:
                self._bury(worker, reason, now)
            for worker in come:
                self._welcome(worker)
        if self._workers.present:
            self._busy_at = now
        elif now - self._busy_at > NOBODY_S:
            raise RolloutError(f"no verifier is left, and none has come back for {NOBODY_S:g} s")

    def _bury(self, worker: Worker, reason: str, now: float) -> None:
        for owned in (self._running, self._ended):
            for request_id in [each for each, sent in owned.items() if sent.worker is worker]:
                del owned[request_id]
        if worker not in self._parts:
            return
        lost = self._dispatcher.leave(worker.name)
        self._round.deaths.append(Death(worker.number, reason, now - self._began, len(lost)))
        self.say(f"{worker.name} {reason} in round {self._round.number}; {len(lost)} requests start again")

    def _show(self) -> None:
        if self._bar.is_due:
            done = len(self._requests) - self._dispatcher.unfinished
            running = sum(len(sent.worker.client.answers[i].tokens) for i, sent in self._running.items())
            self._bar.show(done, self._tokens + running)
