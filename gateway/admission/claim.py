"""What one request asks of the fleet and what it has taken, from the route to the place that submits its sequences.

A context variable carries it through vLLM's pipeline: each request runs in tasks of its own, and those that it starts inherit
its context.  What runs inside the gateway, without an HTTP request of its own, makes one claim per request and enters it in its
task before anything is submitted:
`enter_claim(Claim(caller, Priority.BATCH, wait_s=None, accounts=gateway.doors.quotas, closed=True))`.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from backend.wire.engine import Asked
from gateway.keys.caller import ANYBODY, Caller, Priority

if TYPE_CHECKING:
    from gateway.inquiry import Inquiry


class Accounts(Protocol):
    """Where tokens are charged; `gateway.keys.quotas.Quotas`."""

    def correct(self, caller: Caller, tokens: int) -> None: ...


@dataclass(eq=False, slots=True)
class Claim:
    """One request's."""

    caller: Caller = ANYBODY
    priority: Priority = Priority.INTERACTIVE
    wait_s: float | None = field(default=-1.0)
    """How long it may wait for room, in seconds; None: as long as it takes; negative: as the settings say."""
    sequences: int = 1
    choices: int = 1
    """Sequences that share a prompt (`n`)."""
    expected_tokens: int = 0
    """Prompt and what it will probably generate, of all sequences."""
    charged_tokens: int = 0
    """Of the caller's quota."""
    accounts: Accounts | None = None
    session: str | None = None
    """Which the client named, for affinity."""
    learn: bool = True
    """Whether drafters may learn from its sequences."""
    inquiry: Inquiry | None = None
    """What it asks of speculation."""
    closed: bool = False
    """The HTTP request is over, or there was none: what else its sequences take is charged as they end."""
    granted: bool = False
    """Its sequences may go to the verifiers."""
    retry_after_s: int | None = None
    """It was turned away, to come again in so many seconds."""
    promised: int = 0
    """How many of them have room reserved and have not come."""
    prompt_tokens: float = 0.0
    output_tokens: int = 0
    running: int = 0
    """Sequences that have been submitted and have not ended."""
    queued_s: float = 0.0
    """Waited for room."""
    placed_at: float | None = None
    """When its first sequence went to a verifier; monotonic seconds, as the next."""
    heard_at: float | None = None
    """When a verifier last sent something."""
    verifier: str | None = None
    """Where a sequence went last."""

    @property
    def asked(self) -> Asked:
        """What verifiers are told of it."""
        asked = self.inquiry.asked if self.inquiry is not None else Asked()
        tenant, session = _label(self.caller.owner), _label(self.session or "")
        return msgspec.structs.replace(asked, learn=asked.learn and self.learn, tenant=tenant, session=session)

    @property
    def tokens(self) -> int:
        """Taken so far."""
        return round(self.prompt_tokens) + self.output_tokens

    def settle(self) -> None:
        """Charges what was taken and not charged yet; gives back what was charged and not taken."""
        if self.accounts is not None and self.tokens != self.charged_tokens:
            self.accounts.correct(self.caller, self.tokens - self.charged_tokens)
            self.charged_tokens = self.tokens

    def close(self) -> None:
        """The HTTP request is over."""
        self.closed = True
        self.settle()

    def began(self, prompt_tokens: int, now: float) -> None:
        """One of its sequences went to a verifier."""
        self.running += 1
        self.prompt_tokens += prompt_tokens / self.choices
        if self.placed_at is None:
            self.placed_at = now

    def ended(self) -> None:
        """One of its sequences is."""
        self.running -= 1
        if self.closed:
            self.settle()


def _label(name: str) -> str:
    """Tells names apart and does not show them; empty for an empty one."""
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest() if name else ""


_claim: ContextVar[Claim | None] = ContextVar("claim", default=None)


def enter_claim(claim: Claim) -> None:
    """What this task submits from now on belongs to `claim`."""
    _claim.set(claim)


def current_claim() -> Claim:
    """The claim of the request at hand; where there is none, one of nobody in particular is entered."""
    claim = _claim.get()
    if claim is None:
        claim = Claim()
        _claim.set(claim)
    return claim
