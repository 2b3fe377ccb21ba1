"""Accounts of speculation, for traced requests and those that ask for one.  Engine process, engine thread."""

from __future__ import annotations

from backend.wire.engine import Account, Tally


class Accounts:
    """The accounts of one verifier's requests, by vLLM's ids.  Calls about other requests have no effect."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int | None, Account]] = {}
        self._ended: dict[int, list[Account]] = {}

    def began(self, request_id: str, gateway: int | None, rule: str) -> None:
        """Opens an account.  `gateway`: vLLM's index of the client that gets it at the end; None: no gateway has asked."""
        self._open[request_id] = gateway, Account(request_id, rule=rule)

    def verified(self, request_id: str, source: str, drafter: str, drafted: int, accepted: int, waited_s: float) -> None:
        """Counts a verification (`drafted` 0: without a draft).  Its step had waited `waited_s` for drafts."""
        if request_id not in self._open:
            return
        _, account = self._open[request_id]
        account.verifications += 1
        account.waited_s += waited_s
        if not drafted:
            return
        account.accepted_lengths.extend([0] * (accepted + 1 - len(account.accepted_lengths)))
        account.accepted_lengths[accepted] += 1
        tally = next((each for each in account.tallies if (each.source, each.drafter) == (source, drafter)), None)
        if tally is None:
            tally = Tally(source, drafter)
            account.tallies.append(tally)
        tally.drafts += 1
        tally.drafted += drafted
        tally.accepted += accepted

    def emitted(self, request_id: str, tokens: int) -> None:
        """Counts tokens sent to the gateway: those up to the request's end."""
        if request_id in self._open:
            self._open[request_id][1].tokens += tokens

    def ended(self, request_id: str) -> Account | None:
        """Closes and returns the account; None if the request has none."""
        gateway, account = self._open.pop(request_id, (None, None))
        if gateway is not None and account is not None:
            self._ended.setdefault(gateway, []).append(account)
        return account

    def take(self) -> dict[int, list[Account]]:
        """The accounts of requests that have ended since the last call, by gateway."""
        if not self._ended:
            return self._ended
        taken, self._ended = self._ended, {}
        return taken
