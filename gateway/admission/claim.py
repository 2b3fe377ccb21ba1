"""The claim of one request: what the request needs from the fleet, and what it has used so far.

A context variable carries the claim from the route through vLLM's pipeline to `FleetCore`.  Each request runs in tasks of its
own, and tasks inherit the context of the task that started them.
"""

import hashlib
import math
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from backend.wire.engine import RequestOptions
from gateway.auth.caller import ANYBODY, Caller, Priority
from gateway.auth.quotas import Quotas
from gateway.fleet.statistics import SpeculationOptions


@dataclass(eq=False, slots=True)
class Claim:
    caller: Caller = ANYBODY
    priority: Priority = Priority.INTERACTIVE
    wait_s: float | None = math.inf
    """Seconds that it may wait for room, at most the settings' limit; None: without limit."""
    sequences: int = 1
    choices: int = 1
    """Sequences that share a prompt (`n`)."""
    expected_tokens: int = 0
    """Estimated tokens of all its sequences, prompts and outputs."""
    charged_tokens: int = 0
    """Charged to the caller's quota so far."""
    accounts: Quotas | None = None
    """Where its tokens are charged."""
    request_id: str = ""
    session: str | None = None
    """The client's name for a session, for routing."""
    learn: bool = True
    """Whether drafters may learn from its sequences, and these share look-ups."""
    speculation: SpeculationOptions | None = None
    """The request's options for speculation."""
    closed: bool = False
    """The request is over.  Then tokens are charged as each sequence ends."""
    in_background: bool = False
    """Its work goes on after its HTTP request, and closes the claim in the end."""
    granted: bool = False
    """Its sequences may go to the verifiers."""
    aborted: bool = False
    """They end instead, without a token."""
    retry_after_s: int | None = None
    """It was turned away, and may come again in so many seconds."""
    promised: int = 0
    """How many of its sequences have room reserved and were not submitted yet."""
    prompt_tokens: float = 0.0
    output_tokens: int = 0
    running: int = 0
    """Sequences that were submitted and have not ended."""
    queued_s: float = 0.0
    """Seconds that it waited for room."""
    placed_at: float | None = None
    """When its first sequence went to a verifier; monotonic seconds."""
    heard_at: float | None = None
    """When a verifier last sent an output for it; monotonic seconds."""
    target: str | None = None
    """The verifier that its sequences go to first; None: routing chooses."""
    verifier: str | None = None
    """The verifier that a sequence was given to last."""
    patient: bool = False
    """Its sequences go on after a pause that ends others, and however many verifiers are lost under them."""

    @property
    def options(self) -> RequestOptions:
        """What verifiers are told of it."""
        options = self.speculation.options if self.speculation is not None else RequestOptions()
        tenant, session = _label(self.caller.owner), _label(self.session or "")
        return msgspec.structs.replace(options, learn=options.learn and self.learn, tenant=tenant, session=session)

    @property
    def tokens(self) -> int:
        """Used so far, prompts included."""
        return round(self.prompt_tokens) + self.output_tokens

    def settle(self) -> None:
        """Charges used tokens that were not charged yet, or gives back unused ones."""
        if self.accounts is not None and self.tokens != self.charged_tokens:
            self.accounts.correct(self.caller, self.tokens - self.charged_tokens)
            self.charged_tokens = self.tokens

    def close(self) -> None:
        """Called at the end of the HTTP request; for work in the background, once more at its end."""
        if self.in_background:
            self.in_background = False
            return
        self.closed = True
        self.settle()

    def began(self, prompt_tokens: int, now: float) -> None:
        """Notes that one of its sequences was given to a verifier."""
        self.running += 1
        self.prompt_tokens += prompt_tokens / self.choices
        if self.placed_at is None:
            self.placed_at = now

    def ended(self) -> None:
        self.running -= 1
        if self.closed:
            self.settle()


def _label(name: str) -> str:
    """Tells names apart and does not show them; empty for an empty one."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest() if name else ""


_claim: ContextVar[Claim | None] = ContextVar("claim", default=None)


def enter_claim(claim: Claim) -> None:
    """Sequences that this task submits from now on belong to `claim`."""
    _claim.set(claim)


def current_claim() -> Claim:
    """The claim of the current request; where there is none, a default one is entered."""
    claim = _claim.get()
    if claim is None:
        claim = Claim()
        _claim.set(claim)
    return claim
