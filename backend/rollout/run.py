"""Runs one round of a rollout: sends the batch to the fleet and gathers answers and rows.  The command's process, main thread.

A request is complete when its last token has arrived.  When a worker is lost or drained, its unfinished requests go on at other
workers, after the tokens that have arrived.  The round ends when all workers that live have sent their rows.
"""

from __future__ import annotations

import heapq
import time
import zlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from tqdm import tqdm

from backend.config.sources import CommandError
from backend.engine.client import Answer
from backend.engine.front import RequestOutput, SamplingParams
from backend.engine.front.offline import ResponseMaker
from backend.records.rows import RequestRow
from backend.rollout.dispatch import assign
from backend.rollout.outcome import Death, RoundResult, WorkerShare
from backend.rollout.requests import RolloutRequest
from backend.rollout.workers import Worker, Workers

POLL_S = 0.05
LOOK_S = 0.5
TEND_S = 1.0
DRAW_S, SAY_S = 0.2, 15.0
"""Seconds between two updates of the bar, and between two lines on progress where none is shown."""
ENDS = ("stop", "length", "repetition")
"""Finish reasons of vLLM's with which a response is complete."""
NOBODY_S = 600.0
"""Seconds that a round waits when no verifier is left, for Ray to start another."""


class RolloutError(CommandError):
    """The rollout cannot go on; the message is one line."""


@dataclass(frozen=True)
class _Sent:
    place: int
    """Index of the request in the batch."""
    worker: Worker


class RoundRunner:
    """Runs one round; each round needs a new one."""

    def __init__(
        self,
        number: int,
        requests: Sequence[RolloutRequest],
        workers: Workers,
        window: int,
        responses: ResponseMaker,
        bar: tqdm[None],
        seed: int | None = None,
    ) -> None:
        """At most `window` requests run on a worker at a time.

        `seed` is for free responses whose parameters have none; with None, they are not reproducible.
        """
        self.say: Callable[[str], None] = lambda line: None
        self._round = RoundResult(number)
        self._requests = requests
        self._workers = workers
        self._responses = responses
        self._seed = seed
        self._bar = bar
        self._window = window
        self._left = [request.expected for request in requests]
        """By index in the batch: expected tokens that its worker has not sent yet when it is given the request."""
        self._waiting = [(-tokens, place) for place, tokens in enumerate(self._left)]
        heapq.heapify(self._waiting)
        self._attempts = [0] * len(requests)
        self._running: dict[str, _Sent] = {}
        self._numbers: dict[str, int] = {}
        """Request number by id, for each time that a request was sent."""
        self._sent_at: dict[int, float] = {}
        """By index in the batch: when the request was first sent."""
        self._first_at: dict[int, float] = {}
        """By index in the batch: when its first token came, from whichever worker."""
        self._parts: dict[int, WorkerShare] = {}
        """By worker number."""
        self._tokens = 0
        self._began = self._next_look = self._next_tend = self._next_progress = 0.0
        self._busy_at = 0.0

    def run(self) -> RoundResult:
        """Returns when every request is complete.  Raises `RolloutError`."""
        self._workers.fetch_rows()  # of the time before: `_welcome` begins the round's
        self._workers.look()  # verifiers that were lost between two rounds are not reported
        self._began = self._busy_at = time.monotonic()
        self._next_progress = self._began + (SAY_S if self._bar.disable else DRAW_S)
        for worker in self._workers.present.values():
            self._welcome(worker)
        while len(self._round.responses) < len(self._requests):
            if self._waiting:
                self._send()
            self._work()
        for worker in self._workers.present.values():
            worker.client.ask_rows()
        while any(worker.client.rows_awaited for worker in self._workers.present.values()):
            self._work()
        if not self._bar.disable:
            self._show_progress(time.monotonic())
        self._round.parts = [self._parts[number] for number in sorted(self._parts)]
        self._round.settle(self._numbers)
        return self._round

    def _work(self) -> None:
        self._workers.hub.poll(POLL_S)
        self._receive()
        now = time.monotonic()
        self._look_after(now)
        if now >= self._next_progress:
            self._show_progress(now)

    def _show_progress(self, now: float) -> None:
        tokens = self._tokens + sum(len(self._responses.tokens(sent.place)) for sent in self._running.values())
        progress, done = f"{tokens} tokens, {tokens / max(now - self._began, 1e-3):.0f} tokens/s", len(self._round.responses)
        if self._bar.disable:
            self._next_progress = now + SAY_S
            self.say(f"round {self._round.number}: {done} of {len(self._requests)} requests, {progress}")
        else:
            self._next_progress = now + DRAW_S
            self._bar.set_postfix_str(progress, refresh=False)
            self._bar.update(done - self._bar.n)

    def _welcome(self, worker: Worker) -> None:
        worker.rows = self._parts.setdefault(worker.number, WorkerShare(worker.number)).rows

    def _send(self) -> None:
        running: dict[str, list[int]] = {name: [] for name in self._workers.present}
        for sent in self._running.values():
            running[sent.worker.name].append(self._left[sent.place])
        for place, name in assign(self._waiting, running, self._window):
            self._send_to(place, self._workers.present[name])

    def _send_to(self, place: int, worker: Worker) -> None:
        request = self._requests[place]
        self._attempts[place] += 1
        if self._attempts[place] == 1:
            self._responses.begin(place, request.prompt, request.params)
        request_id = f"{self._round.number}-{request.number}-{self._attempts[place]}"
        worker.client.add(request.prompt, self._params(request), request_id, self._responses.tokens(place))
        self._sent_at.setdefault(place, time.monotonic())
        self._numbers[request_id] = request.number
        self._running[request_id] = _Sent(place, worker)

    def _params(self, request: RolloutRequest) -> SamplingParams:
        params = copy(request.params)
        params.seed = request.seed
        if request.fixed is None and request.seed is None and self._seed is not None:
            params.seed = zlib.crc32(f"{self._seed}/{self._round.number}/{request.number}".encode())
        return params

    def _receive(self) -> None:
        self._workers.receive()
        self._take_outputs()
        for worker in list(self._workers.present.values()):
            batch = worker.take_rows()
            if batch.lost:
                raise RolloutError(f"{worker.name} lost {batch.lost} rows: they came faster than they could be fetched")

    def _take_outputs(self) -> None:
        for request_id, sent in list(self._running.items()):
            answer = sent.worker.client.answers[request_id]
            if not answer.outputs:
                continue
            outputs, answer.outputs = answer.outputs, []
            response = self._responses.take(sent.place, outputs)
            if response is not None:
                self._end(request_id, sent, response)
            elif answer.finish_reason == "abort":
                self._again(request_id)

    def _end(self, request_id: str, sent: _Sent, response: RequestOutput) -> None:
        """Handles the end of a response: its last token has arrived."""
        del self._running[request_id]
        request, (output,) = self._requests[sent.place], response.outputs
        where = f"row {request.case.number}: {sent.worker.name}"
        if output.finish_reason not in ENDS:
            raise RolloutError(f"{where} refused the request ({output.finish_reason})")
        if request.fixed is not None and output.token_ids != request.fixed:
            raise RolloutError(f"{where} did not keep to the response")
        answer = self._take_answer(request_id, sent)
        if answer.finish_reason is None and sent.worker in self._workers.present.values():
            # The worker knows nothing of stop strings.
            sent.worker.client.abort(request_id)
        since, tokens = time.time() - time.monotonic(), len(output.token_ids)
        first_at = self._first_at.get(sent.place, answer.last_at)
        times = (since + self._sent_at[sent.place], since + first_at, since + answer.last_at)
        row = RequestRow(
            str(request.number), *times, len(request.prompt), tokens, 0, 0, 0, output.finish_reason, request.fixed is not None
        )
        self._parts[sent.worker.number].ended.append(row)
        self._round.responses[request.number] = response
        self._round.wall_s = max(self._round.wall_s, answer.last_at - self._began)
        self._tokens += tokens

    def _again(self, request_id: str) -> None:
        """Lets a request wait for another worker, to go on after the tokens that have arrived."""
        sent = self._running.pop(request_id)
        self._take_answer(request_id, sent)
        self._left[sent.place] = max(1, self._requests[sent.place].expected - len(self._responses.tokens(sent.place)))
        heapq.heappush(self._waiting, (-self._left[sent.place], sent.place))

    def _take_answer(self, request_id: str, sent: _Sent) -> Answer:
        answer = sent.worker.client.answers.pop(request_id)
        if answer.first_at:
            self._first_at.setdefault(sent.place, answer.first_at)
        return answer

    def _look_after(self, now: float) -> None:
        if now >= self._next_tend:
            self._next_tend = now + TEND_S
            self._workers.tend()
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
        self._take_outputs()  # A drained worker's last ones came before its rows.
        lost = [request_id for request_id, sent in self._running.items() if sent.worker is worker]
        for request_id in lost:
            self._again(request_id)
        self._round.deaths.append(Death(worker.number, reason, now - self._began, len(lost)))
        self.say(f"{worker.name} {reason} in round {self._round.number}; {len(lost)} requests go on elsewhere")
