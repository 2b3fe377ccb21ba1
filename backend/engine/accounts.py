"""Accounts of speculation, for traced requests and those that ask for one.  Engine process, engine thread."""

from dataclasses import dataclass
from typing import NamedTuple

from backend.speculation.candidate import Request
from backend.speculation.chances import Rule
from backend.wire.engine import Account, RequestOptions, Tally


@dataclass
class RequestState:
    """What this verifier keeps of a request, besides vLLM: attribute `outrider` of vLLM's `Request`."""

    options: RequestOptions
    rule: Rule
    drafting: Request | None = None
    """Its state in the speculator; None in modes without one."""


class DraftOrigin(NamedTuple):
    """Where the draft of a verification came from."""

    drafter_id: str
    ahead: bool = False
    draft_s: float = 0.0
    """Seconds that the drafter computed for the round."""
    source: str = "native"
    """See `Tally.source`."""


UNDRAFTED = DraftOrigin("")


class Verification(NamedTuple):
    """What the target made of one request in the step that ends."""

    base_len: int
    drafted: int
    """Draft tokens; 0: there was no draft."""
    accepted: int
    by: DraftOrigin


class Accounts:
    """The accounts of one verifier's requests, by vLLM's ids.  Calls about other requests have no effect."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int | None, Account]] = {}
        self._ended: dict[int, list[Account]] = {}

    def began(self, request_id: str, gateway: int | None, rule: str) -> None:
        """Opens an account.  `gateway`: vLLM's index of the client that gets it at the end; None: no gateway has asked."""
        self._open[request_id] = gateway, Account(request_id, rule=rule)

    def verified(self, request_id: str, verification: Verification, tokens: int, waited_s: float) -> None:
        """Counts a verification of which `tokens` tokens go to the gateway, and whose step had waited `waited_s` for drafts.

        Draft tokens behind the request's end are not accepted.
        """
        if request_id not in self._open:
            return
        _, account = self._open[request_id]
        account.tokens += tokens
        account.verifications += 1
        account.waited_s += waited_s
        if not verification.drafted:
            return
        accepted, where = min(verification.accepted, tokens), (verification.by.source, verification.by.drafter_id)
        account.accepted_lengths.extend([0] * (accepted + 1 - len(account.accepted_lengths)))
        account.accepted_lengths[accepted] += 1
        tally = next((each for each in account.tallies if (each.source, each.drafter) == where), None)
        if tally is None:
            tally = Tally(*where)
            account.tallies.append(tally)
        tally.drafts += 1
        tally.drafted += verification.drafted
        tally.accepted += accepted

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
