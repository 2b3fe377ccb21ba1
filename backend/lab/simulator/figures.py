"""The figures of a simulation, and their drawing where matplotlib is installed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend.coordinator.assignment import AssignmentPolicy, Decision, Situation
from backend.lab.simulator.simulation import Outcome
from backend.models.resolve import Say


@dataclass
class Timed:
    """A policy under a stopwatch.  `clock` gives seconds."""

    policy: AssignmentPolicy
    clock: Any
    steady_s: list[float] = field(default_factory=list)
    """Of decisions that changed nothing."""
    changing_s: list[float] = field(default_factory=list)

    def decide(self, situation: Situation) -> Decision:
        """The policy's own."""
        # A coordinator does not hold a simulated fleet: the time to look through that for garbage is not the policy's.
        gc.disable()
        began = self.clock()
        decision = self.policy.decide(situation)
        gc.enable()
        (self.changing_s if decision.actions else self.steady_s).append(self.clock() - began)
        return decision


def summary(outcome: Outcome, timed: Timed, seconds: float) -> dict[str, Any]:
    """The figures of a run."""
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
        "requests_moved": outcome.moved,
        "finished_s": outcome.finished_at,
        "decisions": len(timed.steady_s) + len(timed.changing_s),
        "decision_ms": {
            name: {key: value * 1e3 for key, value in quantiles(sorted(times), (0.5, 0.99, 1.0)).items()}
            for name, times in (("steady", timed.steady_s), ("changing", timed.changing_s))
        },
        "samples": [asdict(each) for each in outcome.samples],
    }


def quantiles(ordered: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    """Of ascending values; empty without any."""
    return {f"p{share * 100:g}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares if ordered}


def table(result: Mapping[str, Any]) -> str:
    """What a person wants to see first."""
    tgs, times = result["request_tgs"], result["decision_ms"]["steady"]
    return (
        f"{'tokens/s':>10} {'TGS p50':>8} {'TGS p1':>8} {'moves':>6} {'done s':>7} {'p50 ms':>7} {'p99 ms':>7}\n"
        f"{result['tokens_per_s']:10.0f} {tgs.get('p50', 0):8.1f} {tgs.get('p1', 0):8.1f} {result['reassignments']:6d}"
        f" {result['finished_s']:7.1f} {times.get('p50', 0):7.2f} {times.get('p99', 0):7.2f}"
    )


def draw(result: Mapping[str, Any], file: Path, say: Say) -> bool:
    """Tokens per second, TGS and assignment over time; without matplotlib says so and returns False."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        say(f"no {file.name}: matplotlib is not installed (make setup-dev installs it)")
        return False
    figure = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(4, 1, sharex=True)
    drawn = (
        ("tokens/s", ("tokens_per_s",)),
        ("TGS: mean, slowest", ("mean_tgs", "slowest_tgs")),
        ("reassignments", ("reassignments",)),
        ("pairs, most of one", ("pairs", "most_drafters")),
    )
    for panel, (label, names) in zip(panels, drawn, strict=True):
        at = [sample["at"] for sample in result["samples"]]
        for style, name in zip(("-", ":"), names, strict=False):
            panel.plot(at, [sample[name] for sample in result["samples"]], style, color="#4878a8")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    panels[-1].set_xlabel("seconds")
    figure.savefig(file, dpi=120)
    return True
