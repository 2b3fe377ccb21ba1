"""Which verifiers a trainer has paused, so that those which become ready later are paused too.  Pure."""

from __future__ import annotations

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
