"""Which verifiers a trainer has paused, so that those which become ready later are paused too.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Pauses(msgspec.Struct, frozen=True):
    """All verifiers, or none, and those that are the exception."""

    everyone: bool = False
    exceptions: frozenset[str] = frozenset()

    def holds(self, verifier_id: str) -> bool:
        """Whether this verifier is to be paused."""
        return self.everyone != (verifier_id in self.exceptions)

    def after(self, verifier_id: str | None, paused: bool) -> Pauses:
        """With one verifier paused or resumed; None: all of them."""
        if verifier_id is None:
            return Pauses(paused)
        named = {verifier_id}
        return Pauses(self.everyone, self.exceptions - named if paused == self.everyone else self.exceptions | named)


@dataclass(eq=False)
class _Change:
    before: Pauses
    verifier_id: str | None
    paused: bool
    ended: bool = False


class Changes:
    """Changes that verifiers are being asked for, in order, and those that came after: a refused one is undone alone."""

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def begin(self, before: Pauses, verifier_id: str | None, paused: bool) -> tuple[_Change, Pauses]:
        """A change, for `end`, and the pauses with it."""
        change = _Change(before, verifier_id, paused)
        self._changes.append(change)
        return change, before.after(verifier_id, paused)

    def end(self, change: _Change, now: Pauses, *, refused: bool) -> Pauses:
        """The pauses once a change was made, or was refused."""
        change.ended = True
        if refused:
            place = self._changes.index(change)
            now = change.before
            for later in self._changes[place + 1 :]:
                later.before, now = now, now.after(later.verifier_id, later.paused)
            del self._changes[place]
        while self._changes and self._changes[0].ended:
            del self._changes[0]
        return now
