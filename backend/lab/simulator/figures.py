"""Times the coordinator's decisions in a simulation, and computes the figures of a run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backend.coordinator.assignment import Pair, Situation
from backend.coordinator.water_filling import WaterFilling
from backend.lab.simulator.simulation import Outcome


@dataclass(frozen=True)
class Timed(WaterFilling):
    """The assignment rule, whose decisions are timed."""

    steady_s: list[float] = field(default_factory=list)
    """Seconds of each decision that changed nothing."""
    changing_s: list[float] = field(default_factory=list)
    """Seconds of each decision that changed assignments."""

    def decide(self, situation: Situation) -> set[Pair]:
        # Garbage collection would scan the whole simulated fleet, which a real coordinator does not hold in memory.
        gc.disable()
        began = time.perf_counter()
        wanted = super().decide(situation)
        gc.enable()
        spent = time.perf_counter() - began
        (self.steady_s if wanted == situation.bindings.keys() else self.changing_s).append(spent)
        return wanted


def summary(outcome: Outcome, timed: Timed, seconds: float) -> dict[str, Any]:
    tgs = sorted(outcome.tgs)
    return {
        "tokens_per_s": outcome.tokens / seconds,
        "requests_finished": len(tgs),
        "request_tgs": {"mean": statistics.fmean(tgs) if tgs else None, **quantiles(tgs, (0.01, 0.1, 0.5, 0.9))},
        "reassignments": outcome.counters["reassignments"],
        "assignments_made": outcome.counters["assignments_made"],
        "assignments_dropped": outcome.counters["assignments_dropped"],
        "leases_expired": outcome.counters["leases_expired"],
        "requests_failed_over": outcome.failed_over,
        "finished_s": outcome.finished_at,
        "decisions": len(timed.steady_s) + len(timed.changing_s),
        "decision_ms": {
            name: {key: value * 1e3 for key, value in quantiles(sorted(times), (0.5, 0.99, 1.0)).items()}
            for name, times in (("steady", timed.steady_s), ("changing", timed.changing_s))
        },
        "samples": [asdict(each) for each in outcome.samples],
    }


def quantiles(ordered: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    """Quantiles of ascending values, by name (`p50`); empty without values."""
    return {f"p{share * 100:g}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares if ordered}


def table(result: Mapping[str, Any]) -> str:
    """The main figures as a table of one row."""
    tgs, times = result["request_tgs"], result["decision_ms"]["steady"]
    return (
        f"{'tokens/s':>10} {'TGS p50':>8} {'TGS p1':>8} {'moves':>6} {'done s':>7} {'p50 ms':>7} {'p99 ms':>7}\n"
        f"{result['tokens_per_s']:10.0f} {tgs.get('p50', 0):8.1f} {tgs.get('p1', 0):8.1f} {result['reassignments']:6d}"
        f" {result['finished_s']:7.1f} {times.get('p50', 0):7.2f} {times.get('p99', 0):7.2f}"
    )
