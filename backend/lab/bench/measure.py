"""Turns counters and times into rows.  Pure.

A `Measurement` is one configuration at one point in one round.  A `Row` is all its rounds: medians, with minimum and maximum.
Counters are subtracted, then divided; ratios are never averaged within a sample.  Greedy answers of all configurations are
compared: they should be the same.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from backend.fleet import DraftCounters, DrafterStats, VerifierStats
from backend.lab.bench.pace import Paced
from backend.lab.bench.plan import Configuration, CoreSplit, Point

if TYPE_CHECKING:
    from backend.lab.bench.load import MeasuredLoad

PLAIN = "off"
GROWING = ("drafts", "draft_tokens", "accepted_tokens", "rounds", "draft_s", "ahead_hits", "ahead_misses")


@dataclass(frozen=True)
class Snapshot:
    """Counters of a verifier and its drafter."""

    verifier: VerifierStats
    drafter: DrafterStats | None
    steps: Paced | None = None
    passes: Paced | None = None
    """The drafter's passes in a paced run; `steps` are the verifier's."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement.  `benchmarks/README.md` has the meaning of the figures.

    None: the figure does not exist for this configuration.
    """

    round: int
    tokens_per_s: float
    tgs: float
    ttft_ms: float
    acceptance_length: float | None
    drafted_share: float
    idle_awaiting_draft: float
    t_draft_ms: float | None
    t_verify_ms: float
    hit_rate: float | None
    busy_core_s: float
    tokens_per_busy_core_s: float
    idle: dict[str, float]
    """Without `no_work`, because that lies before and after the load."""
    paced: dict[str, float] = {}
    """Empty for a run that was not paced."""


@dataclass(frozen=True)
class Row:
    """One configuration at one point: a measurement for each round, in order."""

    target: str
    configuration: Configuration
    point: Point
    samples: Sequence[Measurement]

    @property
    def label(self) -> str:
        return self.configuration.label

    def values(self, name: str) -> list[float]:
        """A figure, or a paced one, of each round that has it."""
        found = (sample.paced.get(name, getattr(sample, name, None)) for sample in self.samples)
        return [value for value in found if value is not None]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def document(self, cores: int) -> dict[str, Any]:
        """What `bench.json` has of it; `cores` are the verifier's."""
        about = {"target": self.target, **asdict(self.configuration), **asdict(self.point), "cores": cores}
        return about | {"rounds": msgspec.to_builtins(self.samples)}


def sample(
    number: int, configuration: Configuration, load: MeasuredLoad, before: Snapshot, after: Snapshot, split: CoreSplit
) -> Measurement:
    """The figures of `load`, from the counters before and after it."""
    tokens = sum(len(answer.tokens) for answer in load.answers)
    old, new = before.verifier, after.verifier
    busy_s = new.busy_s - old.busy_s
    idle_s = {cause: seconds - old.idle_s.get(cause, 0.0) for cause, seconds in new.idle_s.items()}
    drafting = drafting_between(old, new)
    core_s = busy_s * len(split.verifier)
    if configuration.is_remote and before.drafter is not None and after.drafter is not None:
        core_s += (after.drafter.busy_s - before.drafter.busy_s) * len(split.drafter)
    awaited = {cause: seconds / load.wall_s for cause, seconds in idle_s.items() if cause != "no_work"}
    foreseen = drafting.ahead_hits + drafting.ahead_misses
    return Measurement(
        round=number,
        tokens_per_s=load.tokens_per_s,
        tgs=statistics.median((len(a.tokens) - 1) / max(a.last_at - a.first_at, 1e-9) for a in load.whole),
        ttft_ms=statistics.median((a.first_at - a.sent_at) * 1e3 for a in load.whole),
        acceptance_length=1 + drafting.accepted_tokens / drafting.drafts if drafting.drafts else None,
        drafted_share=drafting.drafts / max(new.verifications - old.verifications, 1),
        idle=awaited,
        idle_awaiting_draft=awaited.get("awaiting_draft", 0.0),
        t_draft_ms=drafting.draft_s / drafting.rounds * 1e3 if configuration.is_remote and drafting.rounds else None,
        t_verify_ms=(new.verify_s - old.verify_s) / max(new.steps - old.steps, 1) * 1e3,
        hit_rate=drafting.ahead_hits / foreseen if foreseen else None,
        busy_core_s=core_s,
        tokens_per_busy_core_s=tokens / max(core_s, 1e-9),
        paced=_paced(before, after, busy_s, idle_s),
    )


def _paced(before: Snapshot, after: Snapshot, busy_s: float, idle_s: Mapping[str, float]) -> dict[str, float]:
    """The figures of `Measurement.paced`; empty for a run that was not paced."""
    if before.steps is None or after.steps is None:
        return {}
    steps = after.steps.since(before.steps)
    cycles_s = busy_s + sum(seconds for cause, seconds in idle_s.items() if cause != "no_work")
    awaiting_s = idle_s.get("awaiting_draft", 0.0)
    parts_s = {
        "cycle_ms": cycles_s,
        "paced_ms": steps.paced_s,
        "overrun_ms": steps.overrun_s,
        "awaiting_ms": awaiting_s,
        "overhead_ms": cycles_s - steps.paced_s - steps.overrun_s - awaiting_s,
    }
    found = {name: seconds / max(steps.passes, 1) * 1e3 for name, seconds in parts_s.items()}
    found["overrun_share"] = steps.overruns / max(steps.passes, 1)
    passes = after.passes.since(before.passes) if before.passes and after.passes else Paced()
    if passes.passes:
        found["pass_overrun_share"] = passes.overruns / passes.passes
        found["pass_overrun_ms"] = passes.overrun_s / passes.passes * 1e3
    return found


def drafting_between(old: VerifierStats, new: VerifierStats) -> DraftCounters:
    """The growth of the counters over all drafters; lists and reasons are left empty."""
    total = DraftCounters()
    for drafter_id, counters in new.drafters.items():
        earlier = old.drafters.get(drafter_id, DraftCounters())
        for name in GROWING:
            setattr(total, name, getattr(total, name) + getattr(counters, name) - getattr(earlier, name))
    return total


GreedyAnswers = dict[tuple[str, Point, int], dict[Configuration, list[list[int]]]]
"""Greedy answers by target, point and round, and configuration: token ids, in the order of the prompts."""


@dataclass
class Results:
    """A run's origin and its measurements so far."""

    about: Mapping[str, Any]
    options: Namespace
    split: CoreSplit
    samples: dict[tuple[str, Configuration, Point], list[Measurement]] = field(default_factory=dict)
    greedy: GreedyAnswers = field(default_factory=dict)
    targets: dict[str, dict[str, Any]] = field(default_factory=dict)
    complete: bool = False

    def rows(self) -> list[Row]:
        return [Row(*about, samples) for about, samples in self.samples.items()]


def compared(answers: GreedyAnswers) -> int:
    """Number of answers that are compared with a reference."""
    return sum(len(texts) for each in answers.values() for texts in list(each.values())[1:])


def differences(answers: GreedyAnswers) -> list[str]:
    """The first difference of every configuration at every point from plain decoding, or else from the first configuration.

    Another batch adds floats in another order, so near ties may be decided differently in any mode.
    """
    found = []
    for (target, point, number), each in answers.items():
        reference = next((c for c in each if c.mode == PLAIN), next(iter(each)))
        for configuration, texts in each.items():
            differing = (
                f"target {target}, {configuration.label}, {point.name}, round {number}, request {request}: token {position} is "
                f"{other}, with {reference.label} {one}"
                for request, tokens in enumerate(zip(texts, each[reference], strict=True))
                for position, (other, one) in enumerate(zip(*tokens, strict=True))
                if other != one
            )
            found += list(islice(differing, 1))
    return found


def ratios(row: Row, base: Row | None, name: str = "tokens_per_s") -> list[float]:
    """A row's figure divided by `base`'s, in each round that both have; empty without a base."""
    if base is None:
        return []
    return [a / b for a, b in zip(row.values(name), base.values(name), strict=False) if b]
