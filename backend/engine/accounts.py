"""Accounts of speculation, for traced requests and those that ask for one.  Engine process, engine thread."""

from backend.wire.engine import Account, Tally


class Accounts:
    """The accounts of one verifier's requests, by vLLM's ids.  Calls about other requests have no effect."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int | None, Account]] = {}
        self._ended: dict[int, list[Account]] = {}
        self._last: dict[str, tuple[Tally, int]] = {}
        """Of each request whose last verification had a draft: where that counts, and how many tokens of it were accepted."""

    def began(self, request_id: str, gateway: int | None, rule: str) -> None:
        """Opens an account.  `gateway`: vLLM's index of the client that gets it at the end; None: no gateway has asked."""
        self._open[request_id] = gateway, Account(request_id, rule=rule)

    def verified(self, request_id: str, source: str, drafter: str, drafted: int, accepted: int, waited_s: float) -> None:
        """Counts a verification (`drafted` 0: without a draft).  Its step had waited `waited_s` for drafts."""
        if request_id not in self._open:
            return
        self._last.pop(request_id, None)
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
        self._last[request_id] = tally, accepted

    def emitted(self, request_id: str, tokens: int) -> None:
        """Counts the tokens that the last verification sent to the gateway; draft tokens behind the end are not accepted."""
        if request_id not in self._open:
            return
        account = self._open[request_id][1]
        account.tokens += tokens
        tally, accepted = self._last.pop(request_id, (None, 0))
        if tally is not None and accepted > tokens:
            tally.accepted -= accepted - tokens
            account.accepted_lengths[accepted] -= 1
            account.accepted_lengths[tokens] += 1
            while not account.accepted_lengths[-1]:
                account.accepted_lengths.pop()

    def ended(self, request_id: str) -> Account | None:
        """Closes and returns the account; None if the request has none."""
        self._last.pop(request_id, None)
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
