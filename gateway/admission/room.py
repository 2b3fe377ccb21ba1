"""How many more sequences each verifier can run, by its slots and its reports.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from backend.fleet import VerifierStats

SPARE = 8
"""One for so many slots waits at the verifier itself, so that a slot that becomes free is taken in the next step."""


@dataclass(frozen=True, slots=True)
class _Reported:
    others: int
    """Sequences of other gateways, by the lower of two reports: one may count what is on its way here as ended."""
    latest: int
    """By this one alone."""
    most: float
    """It does not run more than this now, whatever its slots: it has no room in its KV cache, or computes prompts."""


class Rooms:
    """`slots` is what a verifier runs at once; None: nobody waits at the gateway."""

    def __init__(self, slots: int | None) -> None:
        self._slots = float("inf") if slots is None else slots
        self._spare = 0 if slots is None else max(1, slots // SPARE)
        self._reported: dict[str, _Reported] = {}

    def observe(self, stats: VerifierStats, own: int) -> None:
        """A verifier has reported; `own` of its sequences are this gateway's."""
        before = self._reported.get(stats.verifier_id)
        latest = max(0, stats.running + stats.waiting - own)
        others = latest if before is None else min(latest, before.latest)
        # What sleeps computes nothing, and has room all the same.
        full = stats.waiting > self._spare and not stats.paused
        self._reported[stats.verifier_id] = _Reported(others, latest, max(1, stats.running) if full else self._slots)

    def gone(self, verifier_id: str) -> None:
        """It was lost."""
        self._reported.pop(verifier_id, None)

    def left(self, verifier_id: str, own: int) -> float:
        """How many more it can take, one that waits there included."""
        reported = self._reported.get(verifier_id)
        others, most = (0, self._slots) if reported is None else (reported.others, reported.most)
        return max(0.0, min(most, self._slots) + self._spare - others - own)
