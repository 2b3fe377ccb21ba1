"""The figures of a simulation, and their drawing where matplotlib is installed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from backend.coordinator.assignment import AssignmentPolicy, Decision, Situation
from backend.coordinator.policy import Coordinator
from backend.models import Say
from backend.simulator.bound import bound_by_drafter
from backend.simulator.fleet import Outcome
from backend.simulator.oracle import best_partition, predicted, upper_bound

MOST_EXACT = 6, 8
"""Verifiers and drafters up to which the best partition is found exactly."""


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


@dataclass
class Referee:
    """Holds the assignment against what is possible, every few samples."""

    every: int
    policy: AssignmentPolicy
    shares: list[float] = field(default_factory=list)
    of_ideal: list[float] = field(default_factory=list)
    """The same against the simpler bound for large fleets, of ideal drafters."""
    anew: list[float] = field(default_factory=list)
    """Of what the policy would assign were nothing bound yet: what hysteresis keeps it from."""
    _seen: int = 0

    def watch(self, now: float, coordinator: Coordinator) -> None:
        """One sample."""
        self._seen += 1
        if self._seen % self.every:
            return
        situation = coordinator.situation(now)
        if not situation.verifiers or not situation.drafters:
            return
        is_small = len(situation.verifiers) <= MOST_EXACT[0] and len(situation.drafters) <= MOST_EXACT[1]
        best = ideal = best_partition(situation) if is_small else upper_bound(situation)
        if not is_small:
            best = min(ideal, bound_by_drafter(situation))
        now = predicted(situation, situation.bindings)
        self.shares.append(now / best)
        self.of_ideal.append(now / ideal)
        placed = self.policy.decide(replace(situation, bindings={})).actions
        self.anew.append(predicted(situation, [(each.verifier, each.drafter) for each in placed]) / best)


def summary(outcome: Outcome, timed: Timed, referee: Referee, seconds: float) -> dict[str, Any]:
    """One policy's run."""
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
        "places_lent": outcome.counters["lends"],
        "decisions": len(timed.steady_s) + len(timed.changing_s),
        "decision_ms": {
            name: {key: value * 1e3 for key, value in quantiles(sorted(times), (0.5, 0.99, 1.0)).items()}
            for name, times in (("steady", timed.steady_s), ("changing", timed.changing_s))
        },
        "share_of_best": {
            "mean": statistics.fmean(referee.shares) if referee.shares else None,
            "least": min(referee.shares, default=None),
            "moments": len(referee.shares),
            "of_ideal_drafters": statistics.fmean(referee.of_ideal) if referee.of_ideal else None,
            "placed_anew": statistics.fmean(referee.anew) if referee.anew else None,
        },
        "samples": [asdict(each) for each in outcome.samples],
    }


def quantiles(ordered: Sequence[float], shares: Sequence[float]) -> dict[str, float]:
    """Of ascending values; empty without any."""
    return {f"p{share * 100:g}": ordered[min(int(share * len(ordered)), len(ordered) - 1)] for share in shares if ordered}


def table(results: Mapping[str, Mapping[str, Any]], best: str) -> str:
    """What a person wants to see first."""
    lines = [
        f"{'policy':16} {'tokens/s':>10} {'TGS p50':>8} {'TGS p1':>8} {'moves':>6} {'done s':>7}"
        f" {'p50 ms':>7} {'p99 ms':>7} {best:>13}"
    ]
    for name, each in results.items():
        tgs, times, share = each["request_tgs"], each["decision_ms"]["steady"], each["share_of_best"]["mean"]
        total, moves = each["tokens_per_s"], each["reassignments"]
        lines.append(
            f"{name:16} {total:10.0f} {tgs.get('p50', 0):8.1f} {tgs.get('p1', 0):8.1f} {moves:6d} {each['finished_s']:7.1f}"
            f" {times.get('p50', 0):7.2f} {times.get('p99', 0):7.2f} {'-' if share is None else f'{share:.3f}':>13}"
        )
    return "\n".join(lines)


def draw(results: Mapping[str, Mapping[str, Any]], file: Path, say: Say) -> bool:
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
        for colour, (policy, each) in zip(("#4878a8", "#d98b3a"), results.items(), strict=False):
            at = [sample["at"] for sample in each["samples"]]
            for style, name in zip(("-", ":"), names, strict=False):
                panel.plot(at, [sample[name] for sample in each["samples"]], style, color=colour, label=policy)
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    panels[-1].set_xlabel("seconds")
    figure.savefig(file, dpi=120)
    return True
