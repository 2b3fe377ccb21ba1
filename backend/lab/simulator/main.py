"""`outrider simulate`: simulates a fleet under the coordinator's own policy and writes figures.  The command's process."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from backend.config.arguments import at_least
from backend.coordinator.policy import LEASE_S, Coordinator
from backend.lab.simulator import arrivals, figures
from backend.lab.simulator.arrivals import TraceError
from backend.lab.simulator.members import Hardware
from backend.lab.simulator.simulation import FleetSimulation, Scenario
from backend.models.resolve import Say


def main(arguments: Sequence[str], say: Say) -> None:
    """Runs a simulation, prints its figures and writes `simulation.json`.

    Wrong options end the program with status 2.  Raises `TraceError` for a wrong trace or event.
    """
    parser = _parser()
    given = parser.parse_args(list(arguments))
    scenario = _scenario(given)
    members = {f"v{i}" for i in range(given.verifiers)} | {f"d{i}" for i in range(given.drafters)}
    for each in scenario.troubles:
        if each.member not in members:
            parser.error(f"no member {each.member}: verifiers are v0, v1, ..., drafters d0, d1, ...")
    began = time.perf_counter()
    timed = figures.Timed()
    outcome = FleetSimulation(scenario, Coordinator(max(LEASE_S, 3 * scenario.report_s), rule=timed)).run()
    result = figures.summary(outcome, timed, scenario.seconds)
    say(f"{scenario.seconds:g} s simulated in {time.perf_counter() - began:.1f} s")
    say(figures.table(result))
    output: Path | None = given.output
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        document = {"arguments": list(arguments), **result}
        (output / "simulation.json").write_text(json.dumps(document, indent=1) + "\n")
        say(f"written to {output}")


def _scenario(given: argparse.Namespace) -> Scenario:
    if given.trace is not None:
        try:
            with given.trace.open(newline="") as lines:
                coming = arrivals.read(lines)
        except OSError as error:
            raise TraceError(f"{given.trace}: {error.strerror}") from error
        seconds = given.seconds or coming[-1].at + 30
    else:
        seconds = given.seconds or 60.0
        coming = arrivals.poisson(
            given.rate or 2.0 * given.verifiers, seconds, given.prompt_tokens, given.response_tokens, given.seed
        )
    us, ms = 1e-6, 1e-3
    hardware = Hardware(
        given.step_ms * ms, given.token_us * us, given.prefill_us * us, given.draft_ms * ms, given.draft_request_us * us
    )
    return Scenario(
        given.verifiers,
        given.drafters,
        seconds,
        coming,
        [arrivals.trouble(each, False) for each in given.fail] + [arrivals.trouble(each, True) for each in given.slow],
        hardware,
        given.spread,
        given.length,
        given.report_s,
        given.skew,
        given.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider simulate",
        description="Simulates a fleet under the coordinator's own policy, event by event.",
    )
    say = parser.add_argument
    say("--verifiers", type=at_least(1), metavar="N", default=1000)
    say("--drafters", type=at_least(1), metavar="N", default=4000)
    say("--seconds", type=_positive, metavar="S", help="simulated time (default: 60, or the trace's)")
    say(
        "--trace", type=Path, metavar="FILE", help=f"CSV of arrivals: {', '.join(arrivals.COLUMNS)} (default: Poisson arrivals)"
    )
    say("--rate", type=_positive, metavar="R", help="Poisson arrivals per second (default: 2 per verifier)")
    say("--prompt-tokens", type=at_least(1), metavar="N", default=256, help="mean (default: 256)")
    say("--response-tokens", type=at_least(1), metavar="N", default=256, help="mean (default: 256)")
    say("--skew", type=_share, metavar="P", default=0.0, help="share of requests for one tenth of the verifiers (default: 0)")
    say("--fail", action="append", default=[], metavar="MEMBER@AT[+S]", help="this member dies; repeatable")
    say("--slow", action="append", default=[], metavar="MEMBER@AT[+S]xF", help="this member is F times as slow; repeatable")
    say("--spread", type=_share, metavar="P", default=0.2, help="how far members differ in speed (default: 0.2)")
    say("--length", type=_positive, metavar="L", default=2.5, help="acceptance length (default: 2.5)")
    say("--step-ms", type=_positive, default=20.0, metavar="T", help="a verifier's step (default: 20)")
    say("--token-us", type=_positive, default=100.0, metavar="T", help="and per token in it (default: 100)")
    say("--prefill-us", type=_positive, default=20.0, metavar="T", help="and per prompt token (default: 20)")
    say("--draft-ms", type=_positive, default=4.0, metavar="T", help="a drafter's round (default: 4)")
    say("--draft-request-us", type=_positive, default=400.0, metavar="T", help="and per request in it (default: 400)")
    say("--report-s", type=_positive, default=0.5, metavar="S", help="time between two reports of a member (default: 0.5)")
    say("--seed", type=int, default=0, metavar="N")
    say("--output", type=Path, metavar="DIR", help="write simulation.json there")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be greater than 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: from 0 to 1")
    return value
