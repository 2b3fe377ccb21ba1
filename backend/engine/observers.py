"""What follows a verifier's requests and steps, and the accounts of speculation that it makes.  Engine process, engine thread.

There are accounts for traced requests and those that ask for one.  `recording.py` and `spans.py` have the other observers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from backend.speculation.candidate import Request
from backend.speculation.chances import RULE_NAMES, Rule
from backend.speculation.waiting import Choice, Plan, StepLoad
from backend.tracing import Span
from backend.wire.engine import Account, RequestOptions, Tally


@dataclass
class Trace:
    """One request's span, and the times of its children."""

    span: Span
    began_ns: int
    scheduled_ns: int = 0
    first_ns: int = 0


@dataclass
class RequestState:
    """What this verifier keeps of a request, besides vLLM: attribute `outrider` of vLLM's `Request`."""

    options: RequestOptions
    rule: Rule
    drafting: Request | None = None
    """Its state in the speculator; None in modes without one."""
    account: Account | None = None
    """None unless it is traced, or its client asks for it."""
    trace: Trace | None = None


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

    request: Any
    """vLLM's `Request`."""
    base_len: int
    drafted: int
    """Draft tokens; 0: there was no draft."""
    accepted: int
    by: DraftOrigin


class Observer:
    """Follows the requests and steps of one verifier.  `CountingScheduler` calls the methods in the order of events.

    Requests are vLLM's.  Here all methods do nothing: a subclass has those that it needs.
    """

    def began(self, request: Any) -> None:
        """vLLM's scheduler takes in a request."""

    def scheduled(self, request: Any) -> None:
        """A request enters the batch."""

    def ran(self, prefilled: int) -> None:
        """The target has run; `prefilled` of its tokens belong to prompts."""

    def verified(self, verification: Verification, tokens: int, waited_s: float) -> None:
        """`tokens` tokens of a verification go to the gateway; its step had waited `waited_s` for drafts."""

    def ended(self, request: Any, reason: str) -> None:
        """A request has finished or was aborted."""

    def stepped(self, scheduler: Any, seconds: float) -> None:
        """The loop has counted a step of `seconds`."""

    def decided(self, plan: Plan, load: StepLoad, choice: Choice, plain_step_s: float) -> None:
        """Mode `auto` changes its plan.  `load` holds what it expects of drafts."""


class Accounts(Observer):
    """Makes the accounts of one verifier's requests."""

    def __init__(self) -> None:
        self._ended: dict[int, list[Account]] = {}

    def began(self, request: Any) -> None:
        if request.outrider.options.account:
            open_account(request.request_id, request.outrider)

    def verified(self, verification: Verification, tokens: int, waited_s: float) -> None:
        """Draft tokens behind the request's end are not accepted."""
        account: Account | None = verification.request.outrider.account
        if account is None:
            return
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

    def ended(self, request: Any, reason: str) -> None:
        if request.outrider.options.account:
            self._ended.setdefault(request.client_index, []).append(request.outrider.account)

    def take(self) -> dict[int, list[Account]]:
        """The accounts that gateways have asked for, of requests that have ended since the last call, by gateway."""
        taken, self._ended = self._ended, {}
        return taken


def open_account(request_id: str, state: RequestState) -> None:
    """Has `Accounts` count what speculation does for a request."""
    state.account = state.account or Account(request_id, rule=RULE_NAMES[state.rule])
