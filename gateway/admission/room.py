"""How many more sequences each verifier can run, computed from its slots and its reports.  Pure."""

from dataclasses import dataclass

from backend.fleet import VerifierStats

SPARE = 8
"""For every so many slots, one sequence beyond the slots waits at the verifier, to take a free slot in the next step."""


@dataclass(frozen=True, slots=True)
class _Reported:
    others: int
    """Sequences of other gateways, by the lower of two reports: one may still count own sequences that have ended here."""
    latest: int
    """Sequences of other gateways, by the last report alone."""
    most: float
    """Most sequences that it runs now; fewer than its slots when its KV cache is full, or while it prefills."""


class Rooms:
    """`slots` is how many sequences a verifier runs at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._spare = max(1, slots // SPARE)
        self._reported: dict[str, _Reported] = {}

    def observe(self, stats: VerifierStats, own: int) -> None:
        """Takes in a verifier's report; `own` of its sequences are this gateway's."""
        before = self._reported.get(stats.verifier_id)
        latest = max(0, stats.running + stats.waiting - own)
        others = latest if before is None else min(latest, before.latest)
        # A paused verifier computes nothing, so its waiting sequences do not mean that it is full.
        full = stats.waiting > self._spare and not stats.paused
        self._reported[stats.verifier_id] = _Reported(others, latest, max(1, stats.running) if full else self._slots)

    def gone(self, verifier_id: str) -> None:
        self._reported.pop(verifier_id, None)

    def left(self, verifier_id: str, own: int) -> float:
        """How many more sequences it can take, those that may wait there included."""
        reported = self._reported.get(verifier_id)
        others, most = (0, self._slots) if reported is None else (reported.others, reported.most)
        return max(0.0, min(most, self._slots) + self._spare - others - own)
