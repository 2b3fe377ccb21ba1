"""Locust's side: users, the shape of the load, and the statistics for its report.  A process of its own, under gevent.

`locust -f loadtest/locustfile.py --headless --load-plan PLAN` is how `python -m loadtest` starts it.  Locust's own rows are the
whole requests; time to first token, chunk gaps and time per token are rows beside them that do not count as requests.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import gevent
import gevent.pool
from locust import LoadTestShape, User, events, task
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV

from loadtest.figures import percentile
from loadtest.plan import ANSWERS, HEALTH, Plan, write_answers
from loadtest.scenarios import SCENARIOS, Stage, arrivals, users_at
from loadtest.session import Session
from loadtest.timing import Answer

SPAWN_RATE = 100.0
LAG_INTERVAL_S = 0.05
UNANSWERED = "unanswered when the load ended"


class Failed(Exception):
    """For Locust's table of failures."""


class Load:
    """What the users of one run share."""

    def __init__(self, environment: Any, plan: Plan) -> None:
        self.plan = plan
        self.scenario = SCENARIOS[plan.scenario]
        self.answers: list[Answer] = []
        self.indices = itertools.count()
        self.began = time.monotonic()
        self._environment = environment
        self._api_key = os.environ.get("OPENAI_API_KEY")
        self._lags: list[float] = []
        self._watching: Any = None

    @property
    def stages(self) -> list[Stage]:
        users = 1 if self.plan.rate else self.plan.users
        return self.scenario.stages(users, self.plan.knobs.duration_s)

    def begin(self) -> None:
        self.began = time.monotonic()
        self._watching = gevent.spawn(self._watch_lag)

    def end(self) -> None:
        """Writes everything down."""
        self._watching.kill()
        directory = Path(self.plan.directory)
        write_answers(directory / ANSWERS, self.answers)
        health = {f"lag_p{p}_ms": round((percentile(self._lags, p) or 0.0) * 1000, 3) for p in (50, 99)}
        (directory / HEALTH).write_text(json.dumps(health) + "\n", encoding="utf-8")
        # Not by --csv: that one is a second behind when the process ends.
        tables = StatsCSV(self._environment, PERCENTILES_TO_REPORT)
        for name, fill in (("stats", tables.requests_csv), ("failures", tables.failures_csv)):
            with (directory / f"locust_{name}.csv").open("w", encoding="utf-8", newline="") as stream:
                fill(csv.writer(stream))

    def session(self) -> Session:
        """A user of its own."""
        return Session(self.plan, next(self.indices), self._api_key, lambda: time.monotonic() - self.began)

    def ask(self, session: Session, started: float | None = None) -> None:
        """One request, booked however it ends."""
        due = time.monotonic() if started is None else started
        number, label = session.number, session.label
        try:
            answer = session.ask(started)
        except gevent.GreenletExit:
            # Locust's patience is over.  A server that hangs must not look as if it had not been asked.
            self._book(Answer(label, session.index, number, due, "failed", UNANSWERED, ended=time.monotonic()))
            raise
        self._book(answer)

    def _book(self, answer: Answer) -> None:
        # What was generated is nobody's business; whether two runs generated the same is.
        answer.text = hashlib.sha256(answer.text.encode()).hexdigest()[:16] if answer.text else ""
        self.answers.append(answer)
        failed = Failed(answer.reason) if answer.outcome in ("failed", "rejected") else None
        self._environment.events.request.fire(
            request_type="POST",
            name=answer.label,
            response_time=(answer.ended - answer.started) * 1000,
            response_length=answer.size,
            exception=failed,
            context={},
        )
        if answer.outcome != "ok":
            return
        extra: dict[str, list[float | None]] = {"TTFT": [answer.ttft_s], "chunk gap": [*answer.gaps_s], "TPOT": [answer.tpot_s]}
        for row, seconds in extra.items():
            for each in seconds:
                if each is not None:
                    # An entry of its own and not an event: events also count as requests in the total.
                    self._environment.stats.get(answer.label, row).log(each * 1000, 0)

    def _watch_lag(self) -> None:
        """How late this process runs what is due: times below are as trustworthy as this is small."""
        while True:
            due = time.monotonic() + LAG_INTERVAL_S
            gevent.sleep(LAG_INTERVAL_S)
            self._lags.append(max(0.0, time.monotonic() - due))


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    parser.add_argument("--load-plan", required=True, include_in_web_ui=False, help="plan written by `python -m loadtest`")


@events.init.add_listener
def _prepare(environment: Any, **_: Any) -> None:
    environment.load = Load(environment, Plan.read(Path(environment.parsed_options.load_plan)))


@events.test_start.add_listener
def _begin(environment: Any, **_: Any) -> None:
    environment.load.begin()


@events.quitting.add_listener
def _end(environment: Any, **_: Any) -> None:
    environment.load.end()
    # The parent judges the run; Locust's own opinion on failures is not asked.
    environment.process_exit_code = 0


class Shape(LoadTestShape):
    """The scenario's stages."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        load: Load = self.runner.environment.load
        users = users_at(load.stages, self.get_run_time())
        return None if users is None else (users, SPAWN_RATE)


class Client(User):
    """A closed loop: asks, waits for the whole answer, asks again.  With a rate of arrivals: one that dispatches them."""

    def on_start(self) -> None:
        self.load: Load = self.environment.load
        self.sessions: list[Session] = []
        self.pool = gevent.pool.Group()
        self.arrivals = None
        if self.load.plan.rate:
            self.arrivals = arrivals(self.load.plan.rate, random.Random(self.load.plan.knobs.seed))
        else:
            self.sessions.append(self.load.session())

    @task
    def work(self) -> None:
        if self.arrivals is None:
            self.load.ask(self.sessions[0])
            return
        due = self.load.began + next(self.arrivals)
        gevent.sleep(max(0.0, due - time.monotonic()))
        session = self.sessions.pop() if self.sessions else self.load.session()
        self.pool.spawn(self._one_arrival, session, due)

    def _one_arrival(self, session: Session, due: float) -> None:
        self.load.ask(session, due)
        self.sessions.append(session)

    def on_stop(self) -> None:
        try:
            self.pool.join()
        finally:
            self.pool.kill()
            for session in self.sessions:
                session.close()
