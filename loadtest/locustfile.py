"""What Locust runs: options, the fleet under test, its users, the verdict.  One process, under gevent.

`locust -f loadtest/locustfile.py --headless`, or without `--headless` for Locust's web page.
"""

import itertools
import json
import random
import shlex
import signal
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import gevent
import httpx
import locust.stats
from locust import FastHttpUser, events, task
from locust.argument_parser import get_parser, gt_zero
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.stats import RequestStats, StatsEntry
from prometheus_client.parser import text_string_to_metric_families

from loadtest import slo
from loadtest.scenarios import SCENARIOS
from loadtest.stream import REJECTED, IncompleteAnswer, StreamedAnswer, read, refusal
from outrider.process import FleetProcess
from outrider.types import OutriderError

START_TIMEOUT_S = 600.0
TLS = httpx.create_ssl_context()
"""Made once, because it takes tens of milliseconds."""
SETTLE_S = 15.0
"""How long requests may take to leave the server after the load."""
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
IN_FLIGHT = ("outrider_requests_in_flight", "outrider_verifier_running", "outrider_verifier_waiting")
ROWS = {"ttft_p{}_ms": "TTFT", "tpot_p{}_ms": "TPOT", "tgs_p{}": "TGS tok/s", "e2e_p{}_ms": "POST"}
"""Names of figures, and the kind of row in Locust's tables that they come from."""


def three_digits(value: float) -> float:
    """What Locust is to round to: by default it rounds to whole numbers, too coarse for TPOT."""
    return float(f"{value:.3g}")


locust.stats.bucket_response_time = three_digits


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.set_defaults(num_users=4, run_time="30", spawn_rate=100.0, stop_timeout="30")
    names = " ".join(f"{name}: {each.__doc__}" for name, each in SCENARIOS.items())
    figures = ", ".join(slo.FLOORS + slo.CEILINGS)
    add = partial(parser.add_argument, include_in_web_ui=False)
    add("--scenario", default="chat", choices=sorted(SCENARIOS), help=names)
    add("--prompt-tokens", type=gt_zero(int), default=128, metavar="N", help="length of prompts, roughly")
    add("--max-tokens", type=gt_zero(int), default=64, metavar="N", help="longest answer")
    add("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature")
    add("--seed", type=int, default=0, metavar="N", help="the same seed asks the same")
    add("--model", default="", metavar="NAME", help="model to ask for (default: the first that is served)")
    add("--api-key", env_var="OPENAI_API_KEY", metavar="KEY", help="key of the gateway")
    add("--timeout", type=gt_zero(float), default=120.0, metavar="S", help="longest silence of a connection")
    add("--slo", type=slo.limits, default={}, metavar="NAME=LIMIT,...", help=f"on top of the default limits: {figures}")
    add("--no-default-slo", action="store_true", help="only the limits given with --slo")
    add("--results", metavar="DIR", help="where reports go (default: loadtest/results/SCENARIO-TIME)")
    add("--serve", default="", metavar="SETTINGS", help="of the `outrider serve` that is started where no --host is given")


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    """Completes the options; starts a fleet where no host is given; ends the program where no load can begin."""
    options = environment.parsed_options
    if options.host and options.serve:
        get_parser().error("--serve is for a fleet that is started here, --host for one that runs")
    if options.master or options.worker or options.processes:
        get_parser().error("the load comes from one process")
    options.results = Path(options.results or f"loadtest/results/{options.scenario}-{time.strftime('%Y%m%d-%H%M%S')}")
    options.html_file = options.html_file or str(options.results / "report.html")
    environment.fleet, environment.before = None, {}
    try:
        if not environment.host:
            print(f"starting outrider serve {options.serve}".rstrip(), flush=True)
            environment.fleet = FleetProcess({}, *shlex.split(options.serve))
            environment.host = environment.fleet.wait_until_it_serves(START_TIMEOUT_S)
        environment.host = environment.host.rstrip("/")
        # Not compressed, so that lines can be read as they arrive.
        environment.headers = {"Accept-Encoding": "identity"}
        if options.api_key:
            environment.headers["Authorization"] = f"Bearer {options.api_key}"
        http = httpx.Client(base_url=environment.host, headers=environment.headers, timeout=10, verify=TLS, trust_env=False)
        environment.http = http
        models = http.get("/v1/models").raise_for_status().json()["data"]
        options.model = options.model or models[0]["id"]
    except OutriderError as error:
        sys.exit(f"loadtest: {error.message}")
    except httpx.HTTPError as error:
        sys.exit(f"loadtest: {environment.host} does not answer: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.headless:
        # Locust handles SIGTERM only after a headless load.
        gevent.signal_handler(signal.SIGTERM, environment.runner.quit)


@events.test_start.add_listener
def begin(environment: Any, **_: Any) -> None:
    """A load begins.  With the web page there may be several, one after the other."""
    environment.indices, environment.began = itertools.count(), time.monotonic()
    environment.before = counters(environment.http)
    options = environment.parsed_options
    print(f"{options.scenario}: {options.num_users} users, {options.run_time} s at {environment.host}", flush=True)


@events.quitting.add_listener
def judge(environment: Any, **_: Any) -> None:
    """Ends the fleet, judges the run and writes the summary."""
    options, fleet = environment.parsed_options, environment.fleet
    limits = ({} if options.no_default_slo else slo.DEFAULT) | options.slo
    if fleet is None and "leftover" not in options.slo:
        # Requests that are left in a running gateway at the end may belong to other clients.
        limits.pop("leftover", None)
    found = client_figures(environment.stats)
    found |= server_figures(environment.http, environment.before, "leftover" in limits)
    options.results.mkdir(parents=True, exist_ok=True)
    if fleet is not None:
        fleet.stop()
        (options.results / "serve.log").write_text(fleet.tail, encoding="utf-8")
    missed = slo.misses(limits, found)
    missed += [f"a user failed: {each['msg']}" for each in environment.runner.exceptions.values()]
    summary = {
        "scenario": options.scenario,
        "users": options.num_users,
        "duration_s": options.run_time,
        "passed": not missed,
        "figures": found,
        "slo": limits,
        "missed": missed,
    }
    text = json.dumps(summary, indent=2)
    (options.results / "summary.json").write_text(text + "\n", encoding="utf-8")
    # Shown after Locust's tables.
    environment.events.quit.add_listener(lambda **_: print(f"{text}\nreports in {options.results}"))
    environment.process_exit_code = int(bool(missed))


def client_figures(stats: RequestStats) -> dict[str, float]:
    """Every figure that the clients measured, over all kinds of requests."""
    total = stats.total
    rejected = sum(each.occurrences for each in stats.errors.values() if str(each.error).startswith(REJECTED))
    whole = total.num_requests - total.num_failures
    found: dict[str, float] = {"requests": whole, "failures": total.num_failures - rejected, "rejected": rejected}
    kinds: dict[str, StatsEntry] = defaultdict(lambda: StatsEntry(stats, "", ""))
    for (_, kind), row in stats.entries.items():
        kinds[kind].extend(row)
    for name, kind in ROWS.items():
        if kinds[kind].response_times:
            found |= {name.format(p): kinds[kind].get_response_time_percentile(p / 100) for p in slo.PERCENTILES}
    wall_s = (stats.last_request_timestamp or 0.0) - stats.start_time
    if wall_s > 0:
        found["requests_per_s"] = three_digits(whole / wall_s)
        found["tokens_per_s"] = three_digits(kinds["tokens"].total_response_time / wall_s)
    return found


def server_figures(http: httpx.Client, before: dict[str, float], settle: bool) -> dict[str, float]:
    """What only the server knows: acceptance length, and with `settle` the number of requests that do not leave it in time."""
    deadline = time.monotonic() + SETTLE_S
    while (after := counters(http)) and settle and any(after[name] for name in IN_FLIGHT) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = {"leftover": sum(after[name] for name in IN_FLIGHT)} if after and settle else {}
    if before and (drafts := after[DRAFTS] - before[DRAFTS]) > 0:
        found["acceptance_length"] = 1 + (after[ACCEPTED] - before[ACCEPTED]) / drafts
    return found


def counters(http: httpx.Client) -> dict[str, float]:
    """The gateway's metrics, each summed over its labels.  Empty if it refuses them or does not answer."""
    sums: dict[str, float] = defaultdict(float)
    try:
        text = http.get("/metrics").raise_for_status().text
    except httpx.HTTPError as error:
        print(f"without acceptance length and leftover: {error}", file=sys.stderr)
        return sums
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


class GatewayUser(FastHttpUser):
    """A user that sends its workload's next request, waits for the whole answer, and repeats."""

    insecure = False
    ssl_context_factory = staticmethod(lambda cafile: TLS)

    def __init__(self, environment: Any) -> None:
        options = environment.parsed_options
        self.network_timeout = self.connection_timeout = options.timeout
        super().__init__(environment)
        # A string as seed gives the same numbers in every process; `hash` of a string does not.
        chance = random.Random(f"{options.seed}/{next(environment.indices)}")
        make = SCENARIOS[options.scenario]
        self.workload = make(options, chance, lambda: (time.monotonic() - environment.began) / options.run_time)
        self.request = next(self.workload)

    @task
    def ask(self) -> None:
        """Makes one request and records it; only complete answers are timed."""
        began = time.monotonic()
        # Locust stops users after the load and its --stop-timeout.  A request that is still open counts as failed: otherwise a
        # server that hangs would look as if it had not been asked.
        answer, fault = StreamedAnswer(), "unanswered when the load ended"
        try:
            answer = self.answer()
            fault = ""
        except (IncompleteAnswer, *FAILURE_EXCEPTIONS) as error:
            fault = str(error) or type(error).__name__
        finally:
            self.environment.events.request.fire(
                request_type="POST",
                name=self.request.label,
                response_time=None if fault else (time.monotonic() - began) * 1000,
                response_length=answer.size,
                exception=fault or None,
                context={},
            )
        if not fault:
            for kind, value in answer.figures(began).items():
                # Not as requests, which would count each request five times in Locust's totals.
                self.environment.stats.get(self.request.label, kind).log(value, 0)
        self.request = self.workload.send(answer.text)

    def answer(self) -> StreamedAnswer:
        """The whole answer to the next request.  Raises `IncompleteAnswer`, or one of Locust's `FAILURE_EXCEPTIONS`."""
        path, body = self.request.path, self.request.body
        response = self.client.post(path, json=body, headers=self.environment.headers, stream=True, catch_response=True)
        if response.status_code not in (0, 200):
            raise IncompleteAnswer(refusal(response.status_code, response.headers, response.content))
        # Without a response the status is 0.
        response.raise_for_status()
        with response.stream as received:
            # By lines: `response.iter_content` would wait until blocks of one size are full, and give early chunks late times.
            return read(iter(lambda: received.readline(b"\n") or received.read(), b""), time.monotonic)
