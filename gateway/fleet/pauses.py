"""Which verifiers a trainer has paused, so that those which become ready later are paused too.  Pure."""

from __future__ import annotations

from uuid import uuid4

import msgspec


class Change(msgspec.Struct, frozen=True):
    """One verifier is paused or goes on; None: all of them."""

    verifier_id: str | None
    paused: bool
    id: str = msgspec.field(default_factory=lambda: uuid4().hex)


class Pauses(msgspec.Struct, frozen=True):
    """The changes in the order in which verifiers were asked for them: of a verifier's, the last one holds."""

    changes: tuple[Change, ...] = ()

    def should_pause(self, verifier_id: str) -> bool:
        """Whether this verifier is to be paused."""
        return next((each.paused for each in reversed(self.changes) if each.verifier_id in (None, verifier_id)), False)

    def plus(self, change: Change) -> Pauses:
        return Pauses((*self.changes, change))

    def without(self, change: Change) -> Pauses:
        """As if a change that was refused had not been asked for."""
        return Pauses(tuple(each for each in self.changes if each != change))

    def settled(self, change: Change) -> Pauses:
        """Without what was asked of the same verifiers before a change that was made."""
        if change not in self.changes:
            return self
        at = self.changes.index(change)
        kept = [each for each in self.changes[:at] if change.verifier_id not in (None, each.verifier_id)]
        return Pauses((*kept, *self.changes[at:]))
