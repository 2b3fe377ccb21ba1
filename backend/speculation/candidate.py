"""One available draft, where it comes from, what is kept of a request, and what a step verifies.  Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul
from typing import NamedTuple

import msgspec
import numpy as np

from backend.fleet import LOOKUP
from backend.speculation.budget import survivals
from backend.speculation.calibration import Offsets
from backend.speculation.chances import Chances, Rule
from backend.speculation.guesses import Guesses
from backend.speculation.pairing import HeadScore, Pairing
from backend.speculation.proposals import Proposal
from backend.speculation.texts import LookupSource
from backend.speculation.waiting import Ask
from backend.wire.drafting import Block
from backend.wire.engine import RequestOptions


class Source(NamedTuple):
    """Where a draft comes from.  The drafts of one source share a calibration."""

    drafter_id: str
    """`LOOKUP` where no drafter made it."""
    rule: Rule
    kind: str = "fresh"
    """A drafter's `fresh` or `ahead`, or `LookupSource.kind`."""


Made = tuple[list[int], list[float], float, Proposal | None]
"""A drafter's draft: tokens, signs, its compute time in seconds, and what it was drawn from."""


class Candidate(msgspec.Struct, frozen=True, eq=False):
    """A draft for the present length of its request."""

    source: Source
    tokens: list[int]
    signs: list[float]
    survivals: list[float]
    """Of a sampled draft, entry i may be read only once token i - 1 is sure to be verified (`proposals.py`)."""
    expected: list[float]
    """Survivals that any decision may read: of a sampled draft, powers of its first token's chance."""
    worth: float
    """Draft tokens expected to be accepted: the sum of `expected`."""
    draft_s: float = 0.0
    """Compute time of its drafter, seconds."""
    proposal: Proposal | None = None
    """What a sampled draft was drawn from."""


class Question(msgspec.Struct, frozen=True):
    """A draft that was asked for and has not come."""

    drafter_id: str
    base_len: int
    asked_at: float
    deadline: float


@dataclass(eq=False)
class Request:
    """A request at this verifier, from its arrival to its end."""

    id: str
    rule: Rule
    longest: int
    """Its longest draft."""
    ask: Ask | None = None
    """What the client wants asked of its drafter; None: the verifier chooses."""
    options: RequestOptions = field(default_factory=RequestOptions)
    prompt_len: int = 0
    text: list[int] = field(default_factory=list)
    """All tokens; the engine's own list, which grows.  Empty until the first step that added tokens."""
    texts: list[LookupSource] = field(default_factory=list)
    """The texts in which drafts are looked up."""
    pairing: Pairing | None = None
    """What decides on its drafter; None until it enters the batch."""
    score: HeadScore | None = None
    """What learns from its verifications, if there was a choice of heads."""
    overdue: dict[int, Question] = field(default_factory=dict)
    """Questions whose drafts have not come and are not waited for any more, by its length at the time."""
    guesses: Guesses = field(default_factory=Guesses)
    """Its drafts that are not compared with its text yet."""
    offsets: Offsets = field(default_factory=dict)
    """Its own offsets in the chances of its drafts (`calibration.py`)."""
    candidate: Candidate | None = None
    """The best draft from a drafter, for the length `candidate_at`."""
    candidate_at: int = 0
    looked_up: Candidate | None = None
    """The best draft from a text, looked up at the length `looked_up_at`."""
    looked_up_at: int = 0
    verified: Candidate | None = None
    """The draft that the running step verifies, uncut."""
    verified_length: int = 0
    """How many of its tokens the step verifies."""
    judged: tuple[Candidate, int, int] | None = None
    """A sampled draft that was verified and not learned from: the draft, tokens accepted, tokens judged."""
    block: tuple[str, Block, float] | None = None
    """Outcomes drafted ahead: drafter, outcomes, and its compute in seconds."""
    outcomes: int = 0
    """How many outcomes were asked for."""
    outcomes_at: int = -1
    """The request's length when they were asked for."""
    offered: Candidate | None = None
    """The best draft when the running step began, verified or not; None until it has."""

    def drop_drafts(self) -> None:
        """Forgets its drafts, and those it was to have."""
        self.candidate = self.looked_up = self.block = self.verified = None
        self.outcomes = 0
        self.overdue.clear()


def begun(requests: Iterable[Request]) -> list[Request]:
    """Those that a step has added tokens to."""
    return [request for request in requests if request.text]


def lacks_block(request: Request, base_len: int) -> bool:
    """Whether outcomes were asked for at this length and have not come."""
    block = request.block
    return request.outcomes > 0 and request.outcomes_at == base_len and (block is None or block[1].base_len != base_len)


DraftLimits = Mapping[str, int] | None
"""The most draft tokens that requests may have in a step; None: any number."""


@dataclass
class Attached:
    """The draft tokens that one step verifies."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    """By request."""
    proposals: dict[str, Proposal] = field(default_factory=dict)
    """What they were sampled from, if they were."""
    lost: list[str] = field(default_factory=list)
    """Drafters that missed a deadline, once for each draft that is no longer waited for."""
    features_needed: bool = False
    """Whether drafters need the features of this step at once."""
    asks: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By request: K and floor of the fresh draft that its drafter is to make as soon as it has this step's rows."""
    is_quiet: bool = False
    """Whether nobody is asked and no draft was found: `Speculator.passed` may then tell how the step ended, not `ended`."""


def candidate_of(
    source: Source,
    tokens: list[int],
    signs: list[float],
    of_each: list[float],
    draft_s: float = 0.0,
    proposal: Proposal | None = None,
) -> Candidate:
    """`of_each`: the chances of its tokens."""
    found = survivals(of_each)
    expected = found if proposal is None else list(accumulate(repeat(found[0], len(found)), mul))
    return Candidate(source, tokens, signs, found, expected, sum(expected), draft_s, proposal)


def candidates_of(source: Source, drafts: Sequence[Made], of_each: Chances) -> list[Candidate]:
    """`candidate_of` of many drafts.  `of_each`: the chances of each one's tokens."""
    if isinstance(of_each, list):
        made = zip(drafts, of_each, strict=True)
        return [candidate_of(source, tokens, signs, its, draft_s, drawn) for (tokens, signs, draft_s, drawn), its in made]
    found = of_each.cumprod(axis=1)
    is_sampled = np.array([drawn is not None for *_, drawn in drafts])[:, None]
    expected = np.where(is_sampled, of_each[:, :1].repeat(of_each.shape[1], axis=1).cumprod(axis=1), found)
    worth = expected.cumsum(axis=1)[np.arange(len(drafts)), [len(tokens) - 1 for tokens, *_ in drafts]]
    rows = zip(drafts, found.tolist(), expected.tolist(), worth.tolist(), strict=True)
    return [
        Candidate(source, tokens, signs, its[: len(tokens)], hoped[: len(tokens)], sum_of, draft_s, drawn)
        for (tokens, signs, draft_s, drawn), its, hoped, sum_of in rows
    ]


def has_rest(request: Request, offered: Candidate, emitted: int) -> bool:
    """Whether a draft's tokens behind the `emitted` ones may still be used.

    Those of a sampled draft may if all that were verified, if any, were accepted: where it is rejected depends on all of them.
    """
    return offered.proposal is None or emitted == request.verified_length + 1


def rank_of(block: Block, emitted: Sequence[int]) -> int | None:
    """The rank in `block` of the outcome of a verification that emitted these tokens; None: it was not drafted ahead."""
    accepted, token = len(emitted) - 1, emitted[-1]
    if block.verifying[:accepted] != list(emitted[:accepted]):
        return None
    for rank, outcome in enumerate(block.outcomes):
        if outcome.accepted == accepted and outcome.token == token:
            return rank
    return None


def early_drafts(known: Sequence[Request], k: int, floor: float, *, of_all: bool) -> dict[str, tuple[int, float]]:
    """The fresh drafts to ask for before a step's outcome is known, as `Attached.asks`, of at most `k` tokens.

    Left out are requests whose own text may have a draft, and those whose outcomes are drafted for.  With `of_all` the
    verifier chooses for requests whose clients do not.
    """
    return {
        request.id: (min(k, request.longest), floor)
        for request in known
        if request.longest
        and (request.ask == Ask.DRAFT or (of_all and request.ask is None))
        and (request.verified is None or request.verified.source.drafter_id != LOOKUP)
    }
