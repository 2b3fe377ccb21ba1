"""The classic rule: the verifier with the fewest drafters first; of those, the one with the most requests.  Pure.

It looks at numbers alone, so it moves a drafter only when a member comes or goes.  Where drafters are fewer than verifiers,
each verifier has one, shared with as few others as possible.
"""

from __future__ import annotations

import heapq
import math

from backend.coordinator.assignment import Bindings, Decision, Situation

ROUNDING = 1e-6


class LeastDrafters:
    """See the module's text."""

    def decide(self, situation: Situation) -> Decision:
        """Binds the free, evens out, shares with those who have none."""
        draft = Bindings(situation)
        if draft.of_verifier and draft.of_drafter:
            load = {each.id: each.requests for each in situation.verifiers}
            _bind_free(draft, load)
            _even_out_verifiers(draft, load)
            _share(draft, load)
            _stop_needless_sharing(draft)
            _even_out_drafters(draft)
        return Decision(draft.actions())


def _bind_free(draft: Bindings, load: dict[str, float]) -> None:
    needs = [(_held(draft, verifier), -load[verifier], verifier) for verifier in draft.of_verifier]
    heapq.heapify(needs)
    for drafter in draft.free():
        held, less_load, verifier = needs[0]
        draft.bind(verifier, drafter)
        heapq.heapreplace(needs, (held + 1, less_load, verifier))


def _even_out_verifiers(draft: Bindings, load: dict[str, float]) -> None:
    """Moves the drafter bound last while one verifier has more than one more than another."""

    def need(verifier: str) -> tuple[float, float, str]:
        return _held(draft, verifier), -load[verifier], verifier

    while True:
        poorest, richest = min(draft.of_verifier, key=need), max(draft.of_verifier, key=need)
        movable = _movable(draft, richest)
        # Shares are fractions: a difference of exactly one must not look like more, or a drafter would go to and fro for ever.
        if _held(draft, richest) - _held(draft, poorest) < 1 + ROUNDING or len(movable) < 2:
            return
        drafter = max(movable, key=lambda each: (_age(draft, richest, each), each))
        draft.unbind(richest, drafter)
        draft.bind(poorest, drafter)


def _share(draft: Bindings, load: dict[str, float]) -> None:
    sharing = [(len(serves), drafter) for drafter, serves in draft.of_drafter.items() if drafter not in draft.pins]
    heapq.heapify(sharing)
    for verifier in sorted(draft.bare(), key=lambda each: (-load[each], each)):
        if not sharing:
            return
        serves, drafter = sharing[0]
        draft.bind(verifier, drafter)
        heapq.heapreplace(sharing, (serves + 1, drafter))


def _stop_needless_sharing(draft: Bindings) -> None:
    """A verifier that has a drafter of its own by now shares no other."""
    for verifier, served in draft.of_verifier.items():
        for drafter in sorted(served):
            shared = len(draft.of_drafter[drafter]) > 1 and drafter not in draft.pins
            if shared and len(served) > 1:
                draft.unbind(verifier, drafter)


def _even_out_drafters(draft: Bindings) -> None:
    """Hands on verifiers while one drafter serves two more than another; these are shared, and have no other drafter."""
    movable = {drafter: serves for drafter, serves in draft.of_drafter.items() if drafter not in draft.pins}
    while movable:
        least = min(movable, key=lambda each: (len(movable[each]), each))
        most = max(movable, key=lambda each: (len(movable[each]), each))
        candidates = sorted(movable[most] - movable[least])
        if len(movable[most]) - len(movable[least]) < 2 or not candidates:
            return
        verifier = max(candidates, key=lambda each: (_age(draft, each, most), each))
        draft.unbind(verifier, most)
        draft.bind(verifier, least)


def _held(draft: Bindings, verifier: str) -> float:
    """A verifier's drafters; one that it shares with others counts for its part."""
    return sum(1 / len(draft.of_drafter[drafter]) for drafter in draft.of_verifier[verifier])


def _movable(draft: Bindings, verifier: str) -> list[str]:
    return [each for each in draft.of_verifier[verifier] if each not in draft.pins and len(draft.of_drafter[each]) == 1]


def _age(draft: Bindings, verifier: str, drafter: str) -> float:
    """Sorts the newest last; what is bound in this very decision is newer than all."""
    since = draft.since(verifier, drafter)
    return math.inf if since is None else since
