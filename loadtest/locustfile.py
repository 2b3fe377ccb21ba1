"""What Locust runs: options, the fleet under test, its users, their number over time, the verdict.  One process, under gevent.

`python -m loadtest` starts it without Locust's web page; `locust -f loadtest/locustfile.py` with it.
"""

import itertools
import json
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import gevent
import httpx
import locust.stats
from gevent import GreenletExit
from locust import LoadTestShape, User, events, task
from locust.argument_parser import gt_zero

from loadtest import metrics, report, slo
from loadtest.client import Client
from loadtest.scenarios import SCENARIOS, Knobs, LoadRequest
from loadtest.stream import StreamedAnswer
from outrider.process import FleetProcess
from outrider.types import OutriderError

SPAWN_RATE = 100.0
START_TIMEOUT_S = 600.0
UNANSWERED = "unanswered when the load ended"

locust.stats.bucket_response_time = report.three_digits


class LoadTest:
    """One run: the gateway under load, and what is needed to judge it.

    Raises `OutriderError` or `httpx.HTTPError` when the fleet does not start or the gateway does not answer.
    """

    def __init__(self, environment: Any) -> None:
        options = environment.parsed_options
        self.scenario = SCENARIOS[options.scenario]
        options.num_users = options.num_users or self.scenario.users
        options.spawn_rate = options.spawn_rate or SPAWN_RATE
        self.results = Path(options.results or f"loadtest/results/{options.scenario}-{time.strftime('%Y%m%d-%H%M%S')}")
        options.html_file = options.html_file or str(self.results / "report.html")
        self.limits = {} if options.no_default_slo else dict(slo.DEFAULT)
        self.fleet: FleetProcess | None = None
        if environment.host:
            # Requests that are left in a running gateway at the end may belong to other clients.
            self.limits.pop("leftover", None)
        else:
            print(f"starting outrider serve {options.serve}".rstrip(), flush=True)
            self.fleet = FleetProcess({}, *shlex.split(options.serve))
            environment.host = self.fleet.wait_until_it_serves(START_TIMEOUT_S)
        self.limits |= options.slo
        self.begin(environment)

    def begin(self, environment: Any) -> None:
        """Takes the options of a load that begins: with the web page there may be several, one after the other."""
        options = environment.parsed_options
        self.users = options.num_users
        duration_s = options.duration or options.run_time or self.scenario.duration_s
        self.indices = itertools.count()
        self.connect: Callable[[], Client] = partial(Client, environment.host, options.api_key, options.timeout)
        self._http = self.connect().http
        model = options.model or self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self.knobs = Knobs(model, options.prompt_tokens, options.max_tokens, options.temperature, options.seed, duration_s)
        try:
            self._before = metrics.read(self._http)
        except httpx.HTTPStatusError:
            self._before = {}
            print("/metrics is refused: without acceptance length and leftover", file=sys.stderr)
            self.limits.pop("leftover", None)

    def end(self, environment: Any) -> None:
        """Ends the fleet, judges the run and writes the summary."""
        found = report.figures(environment.stats)
        try:
            found |= metrics.acceptance_length(self._before, metrics.read(self._http))
            if "leftover" in self.limits:
                found["leftover"] = metrics.left_over(self._http)
        except httpx.HTTPError as error:
            print(f"/metrics does not answer: {type(error).__name__}", file=sys.stderr)
        self.results.mkdir(parents=True, exist_ok=True)
        if self.fleet is not None:
            self.fleet.stop()
            (self.results / "serve.log").write_text(self.fleet.tail, encoding="utf-8")
        missed = slo.misses(self.limits, found)
        missed += [f"a user failed: {each['msg']}" for each in environment.runner.exceptions.values()]
        summary = {
            "scenario": environment.parsed_options.scenario,
            "users": self.users,
            "duration_s": self.knobs.duration_s,
            "passed": not missed,
            "figures": found,
            "slo": self.limits,
            "missed": missed,
        }
        text = report.markdown(summary)
        (self.results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        (self.results / "summary.md").write_text(text + "\n", encoding="utf-8")
        # Shown after Locust's tables.
        environment.events.quit.add_listener(lambda **_: print(f"\n{text}\n\nreports in {self.results}"))
        environment.process_exit_code = int(bool(missed))


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    names = "; ".join(f"{name}: {each.summary}" for name, each in SCENARIOS.items())
    figures = ", ".join(slo.FLOORS + slo.CEILINGS)
    add = partial(parser.add_argument, include_in_web_ui=False)
    add("--scenario", default="chat", choices=sorted(SCENARIOS), help=names)
    add("--duration", type=gt_zero(float), metavar="S", help="seconds of load (default: --run-time, or the scenario's own)")
    add("--prompt-tokens", type=gt_zero(int), default=128, metavar="N", help="length of prompts, roughly")
    add("--max-tokens", type=gt_zero(int), default=64, metavar="N", help="longest answer")
    add("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature")
    add("--seed", type=int, default=0, metavar="N", help="the same seed asks the same")
    add("--model", default="", metavar="NAME", help="model to ask for (default: the first that is served)")
    add("--api-key", env_var="OPENAI_API_KEY", metavar="KEY", help="key of the gateway")
    add("--timeout", type=gt_zero(float), default=120.0, metavar="S", help="longest silence of a connection")
    add("--slo", type=slo.parse, default={}, metavar="NAME=LIMIT,...", help=f"on top of the default limits: {figures}")
    add("--no-default-slo", action="store_true", help="only the limits given with --slo")
    add("--results", metavar="DIR", help="where reports go (default: loadtest/results/SCENARIO-TIME)")
    add("--serve", default="", metavar="SETTINGS", help="of the `outrider serve` that is started where no --host is given")


@events.init.add_listener
def _prepare(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    if options.host and options.serve:
        _refuse(2, "settings behind -- are for a fleet started here; with --host there is none")
    if options.master or options.worker or options.processes:
        _refuse(2, "the load comes from one process")
    try:
        environment.load = LoadTest(environment)
    except OutriderError as error:
        _refuse(1, error.message)
    except httpx.HTTPError as error:
        _refuse(1, f"{environment.host} does not answer: {error}")
    if options.headless:
        # Locust handles SIGTERM only after a headless load.
        gevent.signal_handler(signal.SIGTERM, environment.runner.quit)


def _refuse(status: int, message: str) -> NoReturn:
    print(f"loadtest: {message}", file=sys.stderr)
    sys.exit(status)


@events.test_start.add_listener
def _begin(environment: Any, **_: Any) -> None:
    load = environment.load
    load.begin(environment)
    print(
        f"{environment.parsed_options.scenario}: {load.users} users, {load.knobs.duration_s:g} s at {environment.host}",
        flush=True,
    )


@events.quitting.add_listener
def _end(environment: Any, **_: Any) -> None:
    environment.load.end(environment)


class Shape(LoadTestShape):
    """The scenario's number of users over time."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        assert self.runner is not None
        load: LoadTest = self.runner.environment.load
        share = self.get_run_time() / load.knobs.duration_s
        rate = self.runner.environment.parsed_options.spawn_rate
        return (load.scenario.shape(share, load.users), rate) if share < 1 else None


class VirtualUser(User):
    """A user that sends its workload's next request, waits for the whole answer, and repeats."""

    def on_start(self) -> None:
        self.load: LoadTest = self.environment.load
        self.connection = self.load.connect()
        # A string as seed gives the same numbers in every process; `hash` of a string does not.
        chance = random.Random(f"{self.load.knobs.seed}/{next(self.load.indices)}")
        self.workload = self.load.scenario.make(self.load.knobs, chance, self.environment.shape_class.get_run_time)
        self.next = next(self.workload)

    @task
    def work(self) -> None:
        began = time.monotonic()
        try:
            answer = self.connection.send(self.next)
        except GreenletExit:
            # Locust stops users after the load and its --stop-timeout.  A request that is still open counts as failed: without
            # this record, a server that hangs would look as if it had not been asked.
            self.record(self.next, StreamedAnswer(began, fault=UNANSWERED))
            raise
        self.record(self.next, answer)
        self.next = self.workload.send(answer.text)

    def record(self, request: LoadRequest, answer: StreamedAnswer) -> None:
        """Records an answer; only complete ones are timed."""
        self.environment.events.request.fire(
            request_type="POST",
            name=request.label,
            response_time=None if answer.fault else (answer.ended - answer.started) * 1000,
            response_length=answer.size,
            exception=answer.fault or None,
            context={},
        )
        if not answer.fault:
            for kind, value in answer.figures().items():
                # Not as requests, which would count each request five times in Locust's totals.
                self.environment.stats.get(request.label, kind).log(value, 0)

    def on_stop(self) -> None:
        self.connection.http.close()
