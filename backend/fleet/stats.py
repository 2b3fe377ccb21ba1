"""What verifiers and drafters count and report.  Pure data, in any process.

Members report to the coordinator a few times a second.  A verifier also sends its `VerifierStats` straight to every gateway
connected to it, so that metrics outlive the coordinator.  Counters are cumulative since the process started; `started_at`
tells one incarnation from the next.
"""

from __future__ import annotations

import msgspec

from backend.fleet.speed import RESPONSE_TOKENS, Speed

IDLE_CAUSES = ("no_work", "awaiting_draft", "swap")

LOOKUP = "lookup"
"""Stands among the drafters of a verifier's counters for its own prompt lookup (`speculation/lookups.py`)."""


VERSIONS = 4
"""So many versions of the weights are told apart, the newest."""


class Verified(msgspec.Struct):
    """What came of drafts."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftCounters(msgspec.Struct):
    """What one verifier saw of one drafter ("native" and "ngram" stand for vLLM's own co-located proposers)."""

    drafts: int = 0
    """Verifications that had at least one draft token."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = msgspec.field(default_factory=list)
    accepted_by_position: list[int] = msgspec.field(default_factory=list)
    by_version: dict[str, Verified] = msgspec.field(default_factory=dict)
    """By the version of the target's weights that verified them."""
    rounds: int = 0
    round_trip_s: float = 0.0
    draft_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    """What is left of the round trips that were waited for after the drafter's compute and queue: both ways on the wire, and
    the threads' turns.
    """
    bytes_sent: int = 0
    handovers: int = 0
    """Requests it was given together with features computed before it knew them."""
    handover_rows: int = 0
    handover_bytes: int = 0
    """Of `bytes_sent`, those features."""
    ahead_hits: int = 0
    """Verifications after which a draft was at hand, with drafting ahead on."""
    ahead_misses: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Drafts not used, by reason.

    `finished`: the request ended first; `late`: the request had gone on to where nothing of it fits; `lost`: the deadline
    passed without it; `stale`: not asked for; `invalid`: undecodable, or tokens outside the vocabulary; `overflow`: the
    drafter's queue was full and the round was never sent.
    """


CHANCE_BINS = 10


class Foretold(msgspec.Struct):
    """Chances of draft tokens, as predicted before the text was known, and what came of them; lists are by ten equal bins."""

    chances: list[float] = msgspec.field(default_factory=lambda: [0.0] * CHANCE_BINS)
    """Sum of those predicted."""
    right: list[int] = msgspec.field(default_factory=lambda: [0] * CHANCE_BINS)
    seen: list[int] = msgspec.field(default_factory=lambda: [0] * CHANCE_BINS)
    squared_error: float = 0.0
    """Sum of (chance - right)^2."""

    def plus(self, other: Foretold, sign: int = 1) -> Foretold:
        """Both together, or what this one has more (`sign` -1)."""
        return Foretold(
            [a + sign * b for a, b in zip(self.chances, other.chances, strict=True)],
            [a + sign * b for a, b in zip(self.right, other.right, strict=True)],
            [a + sign * b for a, b in zip(self.seen, other.seen, strict=True)],
            self.squared_error + sign * other.squared_error,
        )

    @property
    def brier(self) -> float:
        """Mean of (chance - right)^2."""
        return self.squared_error / max(sum(self.seen), 1)

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of a bin's mean chance from its share of right ones, over tokens."""
        return sum(abs(p - r) for p, r in zip(self.chances, self.right, strict=True)) / max(sum(self.seen), 1)


class Weights(msgspec.Struct, frozen=True):
    """Which weights of the target a verifier runs."""

    update: int = 0
    """How many times the fleet's weights had been updated when these came; 0: those of the start."""
    version: str = "0"
    """What whoever updated them calls them; without a name, the number above."""
    path: str | None = None
    """The directory they came from; None: they are those of the start, or came as tensors."""


class VerifierStats(msgspec.Struct):
    """One verifier's cumulative counters and present load."""

    verifier_id: str
    started_at: float
    """Unix time in seconds."""
    mode: str
    num_speculative_tokens: int
    busy_s: float = 0.0
    idle_s: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0))
    steps: int = 0
    verify_s: float = 0.0
    """Target forward and sampling, summed over steps."""
    decode_steps: int = 0
    """Steps without prefill; the one below belongs to them."""
    decode_s: float = 0.0
    """Whole steps, bookkeeping and sending included."""
    prefill_tokens: int = 0
    """Tokens computed beyond one per request and its drafts: prompts, and what moved requests bring along."""
    prefill_s: float = 0.0
    """Steps with prefill."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens emitted."""
    verifications: int = 0
    resumed: int = 0
    """Requests that came with tokens emitted elsewhere."""
    requests_finished: dict[str, int] = msgspec.field(default_factory=dict)
    """By vLLM's finish reason: `stop`, `length`, `abort`, `error`, ..."""
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    weights: Weights = Weights()
    paused: bool = False
    """It sleeps, or its weights are being exchanged: requests wait, and so do answers to pings."""
    tokens_in_flight: int = 0
    """Tokens held by running and waiting requests, prompts included."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0..1."""
    drafters: dict[str, DraftCounters] = msgspec.field(default_factory=dict)
    teacher_forced: DraftCounters = msgspec.field(default_factory=DraftCounters)
    """Verifications of fixed responses (rollouts): agreement with a trace, in no drafter's counters above."""
    foretold: dict[str, Foretold] = msgspec.field(default_factory=dict)
    """By source of drafts: `fresh`, `ahead` or `lookup`."""
    drafters_down: list[str] = msgspec.field(default_factory=list)
    """Assigned drafters whose circuit breaker is open: drafts are not waited for."""
    plan_k: int = 0
    """Draft tokens asked of drafters per request at most; 0: they are not asked."""
    plan_outcomes: int = 0
    """Outcomes drafted ahead of time per request."""
    plan_changes: int = 0
    """Times mode `auto` has changed between plain steps, drafting, and drafting ahead."""
    records_written: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows by kind; empty where nothing is recorded."""
    records_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    connections_refused: int = 0
    """To its tcp socket, for want of the fleet's keys."""
    speed: Speed | None = None
    """Of steps without prefill, as they went; None before the first one."""
    plain_step_s: float = 0.0
    """What a step over the running requests takes without drafts, by the verifier's own measurements; 0: not known."""
    drafted_step_s: float = 0.0
    """What it takes with the draft tokens that are expected to be worth verifying."""
    lookup_step_s: float = 0.0
    """A step with what prompt lookup alone would draft; 0: not known, or there is none."""
    lookup_length: float = 0.0
    """Tokens that such a step brings per request."""

    @property
    def response_tokens(self) -> float:
        """Mean length of the responses that have ended of themselves."""
        ended = sum(count for reason, count in self.requests_finished.items() if reason in ("stop", "length"))
        return max(self.tokens / ended, 1.0) if ended else RESPONSE_TOKENS


class Learning(msgspec.Struct, frozen=True):
    """What a drafter that learns from live traffic has done so far."""

    version: int = 0
    """Of its head; 0: the one it began with."""
    steps: int = 0
    training_s: float = 0.0
    owed: int = 0
    """Rows of the replay ring that are still to be trained on, each as often as it will."""
    loss: float | None = None
    """Of the latest steps."""
    sequences: int = 0
    """Put into the replay ring."""
    sequences_dropped: int = 0
    """Not put there because the writer was behind."""
    present_length: float | None = None
    """Acceptance length of the present head on sequences it never learned from (teacher-forced, greedy drafts)."""
    candidate_length: float | None = None
    """That of the head in training, on the same ones."""
    live_acceptance: float | None = None
    """Share of drafts whose first token was right, live and lately."""
    published: int = 0
    taken_back: int = 0


class DrafterStats(msgspec.Struct):
    """One drafter's cumulative counters and present load."""

    drafter_id: str
    started_at: float
    rounds: int = 0
    rows: int = 0
    """Feature rows the cache was extended by."""
    batches: int = 0
    """Rounds are answered in batches; one that drafts nothing (prefill) is not counted."""
    drafts: int = 0
    """Requests drafted for in them."""
    draft_s: float = 0.0
    """Time those batches took."""
    speed: Speed | None = None
    """Of those batches."""
    draft_tokens: int = 0
    busy_s: float = 0.0
    sequences: int = 0
    cache_usage: float = 0.0
    prefix_rows_reused: int = 0
    evictions: int = 0
    rejected: int = 0
    """Messages refused: undecodable, wrong version, wrong width."""
    ahead_dropped: int = 0
    """Items of `Next` given up because the request moved on or a newer one came."""
    connections_refused: int = 0
    """To its tcp socket, for want of the fleet's keys."""
    verifiers: list[str] = msgspec.field(default_factory=list)
    learning: Learning | None = None
    """None: it does not learn."""
