"""Takes back reassignments that measurements speak against.  Pure; `policy.py` owns it and passes the time in.

Predictions take members to have hardware of their own and all that matters to be reported.  Where they share cores, a GPU, a
bus or a network, a drafter that does more for one verifier may cost that one or another more than it brings.  That shows in
what is measured:

    begin    a decision moved drafters between members that were fit; what the verifiers concerned made before is known
    judge    a while later: the same verifiers made fewer tokens per second, and fewer per request
    settle   the pairs go back to what they were, and stay so for `FIRST_HOLD_S`, twice as long after each further failure

Concerned are the verifiers whose drafters change, and those that share cores with the drafters that moved.  While a trial is
open no drafter comes to or leaves any of them.  Where the load changes meanwhile there is no verdict, and a verdict holds for
the load it was reached at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, takewhile

from backend.coordinator.assignment import Action, Bind, Pair, Unbind

SETTLE_S = 2.0
"""After a change, before it is measured: requests open at their new drafters, verifiers choose other plans."""
WORSE = 0.98
"""Less than this share of what was made before is less."""
LEAST_S = 3.0
"""What was made before must have been measured for so long under one assignment."""
FIRST_HOLD_S = 60.0
MOST_DOUBLINGS = 6
MOST_VERDICTS = 256
MOST_NEIGHBOURS = 8
"""With more verifiers beside the moved drafters their noise would hide what a change does; then only its ends count."""
KEPT_S = 60.0
"""Of reports; a change is measured for less."""
FEWEST = 3
"""Reports that say anything."""
NO_WORK = 0.25
"""Requests, in the mean."""


@dataclass
class _Meter:
    """One verifier's tokens and requests of late, report by report."""

    started_at: float
    seen: deque[tuple[float, int, int]] = field(default_factory=deque)
    """When, tokens emitted up to then, requests held then."""
    changed_at: float = 0.0
    """When its drafters were others last."""

    def between(self, begin: float, end: float) -> tuple[float, float, float] | None:
        """Seconds covered, tokens per second and mean number of requests; None where hardly anything was reported."""
        # From the newest on: mostly the last seconds are asked for.
        inside = [*takewhile(lambda each: each[0] >= begin, dropwhile(lambda each: each[0] > end, reversed(self.seen)))]
        seconds = inside[0][0] - inside[-1][0] if inside else 0.0
        if len(inside) < FEWEST or seconds <= 0:
            return None
        return seconds, (inside[0][1] - inside[-1][1]) / seconds, sum(held for _, _, held in inside) / len(inside)


@dataclass(frozen=True)
class _Trial:
    """A change that is being watched."""

    added: frozenset[Pair]
    removed: frozenset[Pair]
    before: Mapping[str, tuple[float, float]]
    """By verifier concerned: tokens per second and requests."""
    began: float


@dataclass
class _Verdict:
    """A change that has made things worse."""

    pairs: frozenset[Pair]
    requests: Mapping[str, float]
    """At the verifiers concerned."""
    until: float
    failures: int = 1


class Trials:
    """`watch_s`: how long a change is measured; 0: none is."""

    def __init__(self, watch_s: float) -> None:
        self._watch_s = watch_s
        self._meters: dict[str, _Meter] = {}
        self._open: list[_Trial] = []
        self._verdicts: list[_Verdict] = []

    def observe(self, verifier: str, started_at: float, tokens: int, requests: int, now: float) -> None:
        """A verifier's report."""
        meter = self._meters.get(verifier)
        if meter is None or meter.started_at != started_at:
            self.forget(verifier)
            meter = self._meters[verifier] = _Meter(started_at, changed_at=now)
        meter.seen.append((now, tokens, requests))
        while meter.seen[0][0] < now - KEPT_S:
            meter.seen.popleft()

    def forget(self, verifier: str) -> None:
        """It is gone, or another process: what was known of it is void."""
        if self._meters.pop(verifier, None) is not None:
            self._open = [trial for trial in self._open if verifier not in trial.before]

    def frozen(self) -> frozenset[str]:
        """Verifiers that keep their drafters for now, because a change is being measured there."""
        return frozenset(verifier for trial in self._open for verifier in trial.before)

    def settled(self, now: float) -> frozenset[Pair]:
        """Pairs that are to stay as they are, bound or not: it was tried otherwise at a load like this."""
        return frozenset(
            pair
            for verdict in self._verdicts
            if verdict.until > now and all(self._is_like(v, n, now) for v, n in verdict.requests.items())
            for pair in verdict.pairs
        )

    def changed(self, actions: Iterable[Action], now: float) -> None:
        """These were carried out, whoever decided them.  What has to be changed during a trial ends it."""
        touched = {action.verifier for action in actions}
        self._open = [trial for trial in self._open if trial.began == now or touched.isdisjoint(trial.before)]
        for verifier in touched & self._meters.keys():
            self._meters[verifier].changed_at = now

    def begin(self, moves: Sequence[Action], neighbours: Callable[[str], Collection[str]], now: float) -> None:
        """Drafters are about to be moved; `neighbours` tells the verifiers that compute where a drafter does."""
        for group in _connected(moves) if self._watch_s else ():
            ends = {action.verifier for action in group}
            beside = {verifier for action in group for verifier in neighbours(action.drafter)} - ends
            concerned = ends | beside if len(beside) <= MOST_NEIGHBOURS else ends
            before = {verifier: self._made_before(verifier, now) for verifier in sorted(concerned)}
            known = {verifier: found for verifier, found in before.items() if found is not None}
            # Without knowing what was made before there is nothing to hold a change against.
            if len(known) == len(before) and sum(tokens for tokens, _ in known.values()) > 0:
                added = frozenset((a.verifier, a.drafter) for a in group if isinstance(a, Bind))
                removed = frozenset((a.verifier, a.drafter) for a in group if isinstance(a, Unbind))
                self._open.append(_Trial(added, removed, known, now))

    def judge(self, now: float) -> list[Action]:
        """What is to be taken back of the changes that were watched for long enough."""
        back: list[Action] = []
        still = []
        for trial in self._open:
            if any(not self._is_like(verifier, requests, now) for verifier, (_, requests) in trial.before.items()):
                continue
            if now < trial.began + SETTLE_S + self._watch_s:
                still.append(trial)
            elif self._was_worse(trial, now):
                self._convict(trial, now)
                back += [Unbind(*pair) for pair in sorted(trial.added)] + [Bind(*pair) for pair in sorted(trial.removed)]
        self._open = still
        return back

    # Details.

    def _made_before(self, verifier: str, now: float) -> tuple[float, float] | None:
        meter = self._meters.get(verifier)
        if meter is None:
            return None
        found = meter.between(max(meter.changed_at + SETTLE_S, now - self._watch_s - SETTLE_S), now)
        return found[1:] if found is not None and found[0] >= LEAST_S else None

    def _is_like(self, verifier: str, requests: float, now: float) -> bool:
        """Whether a verifier has about so many requests now."""
        meter = self._meters.get(verifier)
        found = meter.between(now - SETTLE_S, now) if meter is not None else None
        return found is not None and _is_alike(found[2], requests)

    def _was_worse(self, trial: _Trial, now: float) -> bool:
        after = {verifier: self._meters[verifier].between(trial.began + SETTLE_S, now) for verifier in trial.before}
        found = [each for each in after.values() if each is not None]
        if len(found) < len(after):
            return False
        then = sum(tokens for tokens, _ in trial.before.values()), sum(held for _, held in trial.before.values())
        since = sum(tokens for _, tokens, _ in found), sum(held for _, _, held in found)
        # A load that grows makes more tokens and fewer per request, one that shrinks fewer tokens and more per request.
        return since[0] < WORSE * then[0] and since[0] * then[1] < WORSE * then[0] * since[1]

    def _convict(self, trial: _Trial, now: float) -> None:
        pairs, requests = trial.added | trial.removed, {verifier: held for verifier, (_, held) in trial.before.items()}
        for verdict in self._verdicts:
            if verdict.pairs == pairs and _are_alike(verdict.requests, requests):
                verdict.until = now + FIRST_HOLD_S * 2 ** min(verdict.failures, MOST_DOUBLINGS)
                verdict.failures += 1
                return
        self._verdicts = [*self._verdicts, _Verdict(pairs, requests, now + FIRST_HOLD_S)][-MOST_VERDICTS:]


def _is_alike(requests: float, others: float) -> bool:
    """Whether one load is like another.  With work and without are not alike."""
    return abs(requests - others) <= 1 + 0.4 * others and (requests < NO_WORK) == (others < NO_WORK)


def _are_alike(requests: Mapping[str, float], others: Mapping[str, float]) -> bool:
    return requests.keys() == others.keys() and all(_is_alike(held, others[each]) for each, held in requests.items())


def _connected(moves: Sequence[Action]) -> list[list[Action]]:
    """Moves that have a verifier or a drafter in common, together."""
    groups: list[tuple[set[str], list[Action]]] = []
    for move in moves:
        names, group = {f"v {move.verifier}", f"d {move.drafter}"}, [move]
        apart = []
        for other in groups:
            if other[0] & names:
                names, group = names | other[0], other[1] + group
            else:
                apart.append(other)
        groups = [*apart, (names, group)]
    return [group for _, group in groups]
