"""`make records-cost`: what keeping records costs of the throughput.  Parent process.

    python -m backend.bench.records_cost [--modes off,native,auto] [--pairs 70] [--concurrency 16] [--tokens 32]

One verifier per mode serves the same short closed loop again and again, once with records and once without, in pairs whose order
alternates: nothing but the records differs within a pair.  What the writer computes after a load for rows of that load is added
to the load's time, as if serving had stood still for it.  The cost is 1 - the median of the pairs' ratios of tokens per second,
with the interval in which 95 % of the medians of resampled pairs lie.  The writer's CPU time, of which the files (every
`records.rotate_s` seconds) are a part that a median does not see, is told besides; on cores of its own it costs no throughput.
Exit status 0 when the whole interval is below `--limit`, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from backend.arguments import at_least
from backend.bench.children import ENVIRONMENT
from backend.bench.plan import Configuration, split_cores
from backend.config import environment
from backend.config.settings import Mode

if TYPE_CHECKING:
    from backend.bench.fleet import TargetFleet
    from backend.bench.load import Load

RESAMPLES = 2000
K = 4
PROMPT = 128
POSITIONS = 512
WARM_UPS = 3


@dataclass(frozen=True)
class Timed:
    """One load."""

    tokens: int
    wall_s: float
    recorded: bool
    settling_s: float = 0.0
    """The writer's CPU time for this load's rows after its end."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.wall_s + self.settling_s)


@dataclass(frozen=True)
class Cost:
    """Of one mode.  Parts of 1."""

    mode: str
    pairs: int
    tokens_per_s_without: float
    """The median over the loads without records."""
    cost: float
    low: float
    high: float
    """95 % of the costs of resampled pairs lie between these."""
    writer: float
    """The writer's CPU time per time of serving with records."""

    def verdict(self, limit: float) -> str:
        """What the interval says of a limit."""
        if self.high < limit:
            return f"below {limit:.0%}"
        if self.low >= limit:
            return f"above {limit:.0%}"
        return f"undecided about {limit:.0%}: take more --pairs, or a quieter machine"


def order(pairs: int) -> list[bool]:
    """Which loads are recorded: off on, on off, off on, ..."""
    return [on for pair in range(pairs) for on in ((False, True) if pair % 2 == 0 else (True, False))]


def cost_of(mode: str, loads: Sequence[Timed], writer_s: float, seed: int = 0) -> Cost:
    """From loads in the order of `order`."""
    ratios = []
    for first, second in zip(loads[::2], loads[1::2], strict=True):
        on, off = (first, second) if first.recorded else (second, first)
        ratios.append(on.tokens_per_s / off.tokens_per_s)
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    recorded_s = sum(load.wall_s for load in loads if load.recorded)
    return Cost(
        mode=mode,
        pairs=len(ratios),
        tokens_per_s_without=statistics.median(load.tokens_per_s for load in loads if not load.recorded),
        cost=1 - statistics.median(ratios),
        low=1 - medians[int(0.975 * RESAMPLES) - 1],
        high=1 - medians[int(0.025 * RESAMPLES)],
        writer=writer_s / recorded_s,
    )


def measure(given: argparse.Namespace) -> list[Cost]:
    """One mode after the other; all verifiers are up throughout."""
    # Imported here: vLLM's codec takes seconds, and help must not.
    from backend.bench.fleet import Bench, TargetFleet
    from backend.bench.hardware import gpus
    from backend.bench.prompts import Prompts
    from backend.bench.run import on_cores
    from backend.config import Settings
    from backend.models import resolve

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
    writer_s = fleet.switch_records(configuration, False)["writer_s"]
    loads: list[Timed] = []
    for on in order(given.pairs):
        told = fleet.switch_records(configuration, on)
        if loads and told["settling_s"]:
            loads[-1] = replace(loads[-1], settling_s=told["settling_s"])
        served = load()
        loads.append(Timed(sum(len(answer.tokens) for answer in served.answers), served.wall_s, on))
    told = fleet.switch_records(configuration, False)
    if loads[-1].recorded:
        loads[-1] = replace(loads[-1], settling_s=told["settling_s"])
    found = cost_of(configuration.mode, loads, told["writer_s"] - writer_s)
    _say(
        f"{found.mode:<8}{found.pairs} pairs at {found.tokens_per_s_without:.0f} tokens/s; cost {found.cost:+.2%} "
        f"(95 %: {found.low:+.2%} to {found.high:+.2%}), {found.verdict(given.limit)}; writer's CPU {found.writer:.2%}"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    """Measures and says; the exit status."""
    given = _parser().parse_args(list(arguments))
    environment.export(ENVIRONMENT, override=False)
    found = measure(given)
    if given.output:
        given.output.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n", encoding="utf-8")
    return 0 if all(each.high < given.limit for each in found) else 1


def _parser() -> argparse.ArgumentParser:
    about = "What keeping records costs of the throughput."
    parser = argparse.ArgumentParser(prog="python -m backend.bench.records_cost", description=about)
    say = parser.add_argument
    say("--modes", type=_modes, default=("off", "native", "auto"), metavar="LIST", help="default: off,native,auto")
    say("--pairs", type=at_least(2), default=70, metavar="N", help="of loads with and without records, per mode (default: 70)")
    say("--concurrency", type=at_least(1), default=16, metavar="N", help="requests in flight (default: 16)")
    say("--tokens", type=at_least(2), default=32, metavar="N", help="tokens of every answer (default: 32)")
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
