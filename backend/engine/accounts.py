"""Accounts of speculation, for the requests that ask for one (`RequestOptions.account`).  Engine process, engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.wire.engine import Account, Tally


@dataclass
class _Open:
    gateway: int
    account: Account
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)


class Accounts:
    """The accounts of one verifier's requests, by vLLM's ids; `gateway` is vLLM's client index.

    Calls about other requests have no effect.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._ended: dict[int, list[Account]] = {}

    def began(self, request_id: str, gateway: int) -> None:
        self._open[request_id] = _Open(gateway, Account(request_id))

    def verified(self, request_id: str, source: str, drafter: str, drafted: int, accepted: int, waited_s: float) -> None:
        """Counts a verification (`drafted` 0: without a draft).  Its step had waited `waited_s` for drafts."""
        known = self._open.get(request_id)
        if known is None:
            return
        account = known.account
        account.verifications += 1
        account.waited_s += waited_s
        if not drafted:
            return
        account.accepted_lengths.extend([0] * (accepted + 1 - len(account.accepted_lengths)))
        account.accepted_lengths[accepted] += 1
        tally = known.tallies.get((source, drafter))
        if tally is None:
            tally = known.tallies[source, drafter] = Tally(source, drafter)
            account.tallies.append(tally)
        tally.drafts += 1
        tally.drafted += drafted
        tally.accepted += accepted

    def emitted(self, request_id: str, tokens: int) -> None:
        """Counts tokens sent to the gateway: those up to the request's end."""
        known = self._open.get(request_id)
        if known is not None:
            known.account.tokens += tokens

    def ended(self, request_id: str) -> None:
        known = self._open.pop(request_id, None)
        if known is not None:
            self._ended.setdefault(known.gateway, []).append(known.account)

    def take(self) -> dict[int, list[Account]]:
        """The accounts of requests that have ended since the last call, by gateway."""
        if not self._ended:
            return self._ended
        taken, self._ended = self._ended, {}
        return taken
