"""Locust's part: users, the shape of the load, and the requests for its report.  A process of its own, under gevent.

`locust -f loadtest/locustfile.py --headless --load-plan PLAN` is how `python -m loadtest` starts it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import gevent
from locust import LoadTestShape, User, events, task

from loadtest.client import Client
from loadtest.figures import percentile
from loadtest.plan import ANSWERS, HEALTH, Plan, write_answers
from loadtest.scenarios import SCENARIOS, users_at
from loadtest.timing import Answer

SPAWN_RATE = 100.0
LAG_INTERVAL_S = 0.05
UNANSWERED = "unanswered when the load ended"


class Failed(Exception):
    """A failed request, in Locust's table of failures."""


class Load:
    """State that all users of one run share."""

    def __init__(self, environment: Any, plan: Plan) -> None:
        self.plan = plan
        self.scenario = SCENARIOS[plan.scenario]
        self.stages = self.scenario.stages(plan.users, plan.knobs.duration_s)
        self.answers: list[Answer] = []
        self.indices = itertools.count()
        self.began = time.monotonic()
        self._environment = environment
        self._lags: list[float] = []
        self._watching: Any = None

    def begin(self) -> None:
        self.began = time.monotonic()
        self._watching = gevent.spawn(self._watch_lag)

    def end(self) -> None:
        """Writes the answers, and how well the load generator kept up."""
        self._watching.kill()
        directory = Path(self.plan.directory)
        write_answers(directory / ANSWERS, self.answers)
        health = {f"lag_p{p}_ms": round((percentile(self._lags, p) or 0.0) * 1000, 3) for p in (50, 99)}
        (directory / HEALTH).write_text(json.dumps(health) + "\n", encoding="utf-8")

    def book(self, answer: Answer) -> None:
        """Records an answer, complete or not."""
        # Only a hash of the text is kept: enough to compare two runs, and no generated text is stored.
        answer.text = hashlib.sha256(answer.text.encode()).hexdigest()[:16] if answer.text else ""
        self.answers.append(answer)
        self._environment.events.request.fire(
            request_type="POST",
            name=answer.label,
            response_time=(answer.ended - answer.started) * 1000,
            response_length=answer.size,
            exception=Failed(answer.reason) if answer.outcome in ("failed", "rejected") else None,
            context={},
        )

    def _watch_lag(self) -> None:
        """Samples how late this process runs what is due; the answers' times are off by up to this lag."""
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
    # The parent process judges the run, so Locust's exit status for failures is not used.
    environment.process_exit_code = 0


class Shape(LoadTestShape):
    """The scenario's stages."""

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        users = users_at(self.runner.environment.load.stages, self.get_run_time())
        return None if users is None else (users, SPAWN_RATE)


class Asker(User):
    """A user that sends its workload's next request, waits for the whole answer, and repeats."""

    def on_start(self) -> None:
        self.load: Load = self.environment.load
        plan = self.load.plan
        self.index = next(self.load.indices)
        self.number = 0
        self.connection = Client(plan.host, os.environ.get("OPENAI_API_KEY"), plan.timeout_s)
        # A string as seed gives the same numbers in every process; `hash` of a string does not.
        chance = random.Random(f"{plan.knobs.seed}/{self.index}")
        self.workload = self.load.scenario.make(plan.knobs, chance, lambda: time.monotonic() - self.load.began)
        self.next = next(self.workload)

    @task
    def work(self) -> None:
        began = time.monotonic()
        try:
            answer = self.connection.ask(self.next, self.index, self.number)
        except gevent.GreenletExit:
            # Locust stops users after the load and its drain time.  A request that is still open counts as failed: without
            # this record, a server that hangs would look as if it had not been asked.
            ended = time.monotonic()
            self.load.book(Answer(self.next.label, self.index, self.number, began, "failed", UNANSWERED, ended=ended))
            raise
        self.number += 1
        self.next = self.workload.send(answer)
        self.load.book(answer)

    def on_stop(self) -> None:
        self.connection.close()
