"""`make records-cost`: what keeping records costs of the throughput.  Parent process.

    python -m backend.lab.bench.records_cost [--modes off,native,auto] [--pairs 70] [--concurrency 16] [--tokens 16]

One verifier per mode serves the same short closed loop again and again, with records and without, in pairs whose order
alternates: nothing but the records differs within a pair.  What the writer computes after a load for that load's rows is
added to the load's time, as if serving had stood still for it.  Two ratios of each pair are looked at:

    throughput   tokens per second: what a client sees; other work on the machine disturbs it
    CPU          the verifier process's CPU time, the writer's thread included: what was computed, whoever else ran

The cost is 1 - the median ratio, with the interval in which 95 % of the medians of resampled pairs lie.  On a machine that does
other things that interval is wide.  So the cost is also counted, in some loads more: the engine thread's CPU time in the code
that makes rows, under a stopwatch, and the writer's CPU time, files included, both over the time of serving.  That is the most
that records can cost where the writer has no core of its own, but for what they do to caches.  Exit status 0 when what is
counted is below `--limit` and the throughput's interval not above it, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from backend.config import environment
from backend.config.arguments import at_least
from backend.config.settings import Mode
from backend.lab.bench.children import ENVIRONMENT
from backend.lab.bench.plan import Configuration, split_cores

if TYPE_CHECKING:
    from backend.lab.bench.engines import TargetFleet
    from backend.lab.bench.load import Load

RESAMPLES = 2000
K = 4
PROMPT = 128
POSITIONS = 512
WARM_UPS = 3
WATCHED = 10
"""Loads under the stopwatch."""


@dataclass(frozen=True)
class Timed:
    """One load."""

    tokens: int
    wall_s: float
    cpu_s: float
    """Of the verifier's process, without `settling_s`."""
    recorded: bool
    settling_s: float = 0.0
    """The writer's CPU time for this load's rows after its end."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.wall_s + self.settling_s)

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / (self.cpu_s + self.settling_s)


@dataclass(frozen=True)
class Interval:
    """A median and what 95 % of the medians of resampled values lie between."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


@dataclass(frozen=True)
class Cost:
    """Of one mode, in parts of 1."""

    mode: str
    pairs: int
    tokens_per_s_without: float
    """The median over the loads without records."""
    throughput: Interval
    cpu: Interval
    rows: float
    """The engine thread's CPU time in making rows, per time of serving."""
    writer: float
    """The writer's, likewise."""

    def is_below(self, limit: float) -> bool:
        """What was counted is below, and the throughput's interval not above."""
        return self.rows + self.writer < limit and self.throughput.low < limit

    def verdict(self, limit: float) -> str:
        """What the throughput's interval says of a limit."""
        if self.throughput.high < limit:
            return f"below {limit:.0%}"
        if self.throughput.low >= limit:
            return f"above {limit:.0%}"
        return f"undecided about {limit:.0%} (more --pairs, or a quieter machine, would tell)"


def order(pairs: int) -> list[bool]:
    """Which loads are recorded: off on, on off, off on, ..."""
    return [on for pair in range(pairs) for on in ((False, True) if pair % 2 == 0 else (True, False))]


def interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The bootstrap's interval of the median."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Interval(statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1])


def cost_of(mode: str, loads: Sequence[Timed], rows: float, writer: float) -> Cost:
    """From loads in the order of `order`, and what was counted."""
    pairs = [
        (first, second) if first.recorded else (second, first) for first, second in zip(loads[::2], loads[1::2], strict=True)
    ]
    return Cost(
        mode=mode,
        pairs=len(pairs),
        tokens_per_s_without=statistics.median(off.tokens_per_s for _, off in pairs),
        throughput=interval([1 - on.tokens_per_s / off.tokens_per_s for on, off in pairs]),
        cpu=interval([1 - on.tokens_per_cpu_s / off.tokens_per_cpu_s for on, off in pairs]),
        rows=rows,
        writer=writer,
    )


def measure(given: argparse.Namespace) -> list[Cost]:
    """One mode after the other; all verifiers are up throughout."""
    # Imported here: vLLM's codec takes seconds, and help must not.
    from backend.config import Settings
    from backend.lab.bench.engines import Bench, TargetFleet
    from backend.lab.bench.hardware import gpus
    from backend.lab.bench.prompts import Prompts
    from backend.lab.bench.run import on_cores
    from backend.models.resolve import resolve

    split = split_cores(sorted(os.sched_getaffinity(0)), None, None)
    configured = [Configuration("equal_verifier", mode, 0 if mode == "off" else K, split.verifier) for mode in given.modes]
    with tempfile.TemporaryDirectory(prefix="orrc") as name, on_cores(split.drafter):
        models = resolve(Settings(), _say)
        bench = Bench(models, split, Path(name), len(gpus()), POSITIONS, given.concurrency, records=Path(name) / "records")
        make = Prompts(models.target_dir, PROMPT)
        prompts = [make.make("code", f"records/{i}") for i in range(given.concurrency)]
        with TargetFleet(bench, configured, _say) as fleet:
            return [_measure_mode(fleet, configuration, prompts, given) for configuration in configured]


def _measure_mode(
    fleet: TargetFleet, configuration: Configuration, prompts: list[list[int]], given: argparse.Namespace
) -> Cost:
    def load() -> Load:
        return fleet.load(configuration, prompts, given.tokens, given.concurrency)

    for _ in range(WARM_UPS):
        load()
    before = began = fleet.switch_records(configuration, False)
    loads: list[Timed] = []
    wanted = [*order(given.pairs), False]
    for recorded, then in itertools.pairwise(wanted):
        served = load()
        # Left on between two recorded loads: the writer may go on, and what it computes is theirs.
        after = fleet.switch_records(configuration, then)
        tokens = sum(len(answer.tokens) for answer in served.answers)
        cpu_s = after["called_s"] - before["done_s"]
        loads.append(Timed(tokens, served.wall_s, cpu_s, recorded, after["settling_s"]))
        before = after
    recorded_s = sum(each.wall_s for each in loads if each.recorded)
    writer = (before["writer_s"] - began["writer_s"]) / recorded_s
    fleet.switch_records(configuration, True, timed=True)
    watched_s = sum(load().wall_s for _ in range(WATCHED))
    rows = fleet.switch_records(configuration, False)["rows_s"] / watched_s
    found = cost_of(configuration.mode, loads, rows, writer)
    _say(
        f"{found.mode:<7}{found.pairs} pairs at {found.tokens_per_s_without:.0f} tokens/s: throughput {found.throughput}, "
        f"CPU {found.cpu}; {found.verdict(given.limit)}\n"
        f"       counted: rows {found.rows:.2%}, writing them {found.writer:.2%}, together {found.rows + found.writer:.2%}"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    """Measures and says; the exit status."""
    given = _parser().parse_args(list(arguments))
    environment.export(ENVIRONMENT, override=False)
    found = measure(given)
    if given.output:
        given.output.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    return 0 if all(each.is_below(given.limit) for each in found) else 1


def _parser() -> argparse.ArgumentParser:
    about = "What keeping records costs of the throughput."
    parser = argparse.ArgumentParser(prog="python -m backend.lab.bench.records_cost", description=about)
    say = parser.add_argument
    say("--modes", type=_modes, default=("off", "native", "auto"), metavar="LIST", help="default: off,native,auto")
    say("--pairs", type=at_least(2), default=70, metavar="N", help="of loads with and without records, per mode (default: 70)")
    say("--concurrency", type=at_least(1), default=16, metavar="N", help="requests in flight (default: 16)")
    say("--tokens", type=at_least(2), default=16, metavar="N", help="tokens of every answer (default: 16)")
    say("--limit", type=float, default=0.01, metavar="X", help="what records may cost, as a part of 1 (default: 0.01)")
    say("--output", type=Path, metavar="FILE", help="write the figures there as JSON")
    return parser


def _modes(text: str) -> tuple[Mode, ...]:
    wanted = [part.strip() for part in text.split(",")]
    unknown = [part for part in wanted if part not in get_args(Mode)]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(get_args(Mode))}")
    return tuple(mode for mode in get_args(Mode) if mode in wanted)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
