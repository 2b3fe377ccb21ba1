"""`make monitoring-check`: runs a real Prometheus on a fleet under load, and compares its figures with the records.

    python -m dashboards.check [--scenario NAME] [--users N] [--seconds S] [--gateway URL] [-- SETTINGS FOR SERVE]

Starts a fleet that keeps records, a Prometheus with the committed configuration and rules, and a scenario of the load tests.
Then it checks that (a) every expression of panels, lists and rules returns data, and (b) acceptance length, idle shares and TGS
from Prometheus and from the records agree within 2 %.  With --gateway, for a running fleet, it checks only (a).  Exit status: 0
all checks passed, 1 some failed, 2 they could not be made.  Everything that was started is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from dashboards import scraping
from dashboards.comparing import compare, table
from dashboards.expressions import Expression, may_be_empty, of_panels, of_recordings, of_rules, of_variables
from dashboards.scraping import Prometheus, PrometheusError
from loadtest.options import split
from loadtest.served import FleetError, Gateway, OwnFleet

ROOT = Path(__file__).resolve().parent.parent
NOTHING = "returns nothing"
QUIET_TIMEOUT_S = 60.0
SCRAPES = 3
"""Scrapes in a row with the same number of steps, and no requests, after which the fleet counts as idle."""


def main(arguments: Sequence[str]) -> int:
    ours, settings = split(arguments)
    given = _parser().parse_args(ours)
    if given.gateway and settings:
        print("settings behind -- are for a fleet started here; with --gateway there is none", file=sys.stderr)
        return 2
    try:
        scraping.find_program()
        with tempfile.TemporaryDirectory(prefix="outrider-check-") as folder:
            return _check(given, settings, Path(folder))
    except (FleetError, PrometheusError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dashboards.check", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--gateway", help="URL of a running gateway; default: start a fleet")
    parser.add_argument("--scenario", default="completion", help="of the load tests (default completion)")
    parser.add_argument("--users", type=int, default=6, help="requests in flight (default 6)")
    parser.add_argument("--seconds", type=float, default=75.0, help="how long the load lasts (default 75)")
    return parser


def _check(given: argparse.Namespace, settings: Sequence[str], folder: Path) -> int:
    with contextlib.ExitStack() as stack:
        gateway, fleet = given.gateway, None
        if gateway is None:
            print("starting a fleet that keeps records", flush=True)
            fleet = OwnFleet(("--records-dir", str(folder / "records"), *settings), folder / "serve.log")
            stack.callback(fleet.stop)
            gateway = fleet.wait_ready()
        prometheus = stack.enter_context(scraping.running(gateway))
        # A counter is exported only after its first count, so one request is completed before the period begins.
        _complete_one(gateway)
        since = _at_rest(prometheus)
        print(f"{given.scenario}: {given.users} users, {given.seconds:g} s", flush=True)
        well = _load(given, gateway, folder / "load")
        well &= _report_expressions(prometheus)
        until = _at_rest(prometheus)
        if fleet is not None:
            # The first step after the period records how long there was no work before it.  Ending the fleet completes records.
            _complete_one(gateway)
            fleet.stop()
            well &= _report_comparison(prometheus, folder / "records", since, until)
    return 0 if well else 1


def _load(given: argparse.Namespace, gateway: str, results: Path) -> bool:
    command = [sys.executable, "-m", "loadtest", "--host", gateway, "--scenario", given.scenario, "--users", str(given.users)]
    command += ["--duration", f"{given.seconds:g}", "--max-tokens", "128", "--results", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True
    print(f"the load test failed:\n{done.stdout}{done.stderr}")
    return False


def _report_expressions(prometheus: Prometheus) -> bool:
    bad, empty = 0, []
    expressions = [*of_panels(), *of_variables(), *of_rules(), *of_recordings()]
    for each in expressions:
        problem = _problem(prometheus, each)
        reason = may_be_empty(each) if problem == NOTHING else ""
        if reason:
            empty.append(f"{each.where}: {reason}")
        elif problem:
            bad += 1
            print(f"{each.where}: {problem}\n    {each.promql}")
    print(f"{len(expressions) - bad - len(empty)} of {len(expressions)} expressions return data, {bad} do not but should")
    print(f"{len(empty)} return nothing, for a reason:", *(f"  {line}" for line in empty), sep="\n")
    return not bad


def _problem(prometheus: Prometheus, expression: Expression) -> str:
    try:
        series = prometheus.query(expression.promql)
    except PrometheusError as error:
        return str(error)
    if any(math.isnan(value) for _, value in series):
        return "returns NaN"
    return "" if series else NOTHING


def _report_comparison(prometheus: Prometheus, records: Path, since: float, until: float) -> bool:
    quantities = compare(prometheus, records, since, until)
    print(f"{until - since:.0f} s, from {since:.1f} to {until:.1f}:", *table(quantities), sep="\n")
    differing = [each.name for each in quantities if not each.agrees]
    print("Prometheus and the records agree" if not differing else f"they differ in: {', '.join(differing)}", flush=True)
    return not differing


def _at_rest(prometheus: Prometheus) -> float:
    """Waits until `SCRAPES` scrapes in a row show no new step and no request; returns the last one's time in Unix seconds."""
    deadline = time.monotonic() + QUIET_TIMEOUT_S
    seen: list[tuple[float, float]] = []
    while len(seen) < SCRAPES:
        if time.monotonic() > deadline:
            raise PrometheusError("the fleet does not come to rest")
        time.sleep(0.5)
        now = time.time()
        steps = prometheus.query("sum(max by (verifier) (outrider_verifier_steps_total))", now)
        at = prometheus.query("max(timestamp(outrider_verifier_steps_total))", now)
        busy = prometheus.query("sum(outrider_requests_in_flight) + sum(outrider_verifier_running)", now)
        if not steps or not at or not busy or busy[0][1] or (seen and seen[-1][1] != steps[0][1]):
            seen = []
        elif not seen or at[0][1] > seen[-1][0]:
            seen.append((at[0][1], steps[0][1]))
    return seen[-1][0]


def _complete_one(gateway: str) -> None:
    body = {"model": Gateway(gateway, None).model(), "prompt": "def add(a, b):\n    ", "max_tokens": 32, "temperature": 0}
    httpx.post(f"{gateway}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
