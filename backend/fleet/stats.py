"""The counters that verifiers and drafters report.  Pure data, in any process.

Members report to the coordinator a few times a second.  A verifier also sends its `VerifierStats` directly to every connected
gateway, so metrics do not depend on the coordinator.  Counters are cumulative since the process started (`started_at`).

A field is exported by its line in `DEFINITIONS` (`gateway/metrics/gateway.py`): `_pair` for those of `DraftCounters`, which
count per drafter (`counters.drafter(id).FIELD += n`, `backend/engine/counting.py`), `_verifier` and `_drafter` for the others.
"""

import msgspec

from backend.fleet.speed import RESPONSE_TOKENS, Speed

IDLE_CAUSES = ("no_work", "awaiting_draft", "swap")

LOOKUP = "lookup"
"""A verifier's own look-ups (`speculation/texts.py`), as an id in `VerifierStats.drafters`."""


VERSIONS = 4
"""Versions of the weights that are counted separately: the newest."""


class Verified(msgspec.Struct):
    """Counts of verified drafts."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class DraftCounters(msgspec.Struct):
    """One verifier's counts of one drafter.  "native" and "ngram" are vLLM's own co-located proposers."""

    drafts: int = 0
    """Verifications that had at least one draft token."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: list[int] = msgspec.field(default_factory=list)
    accepted_by_position: list[int] = msgspec.field(default_factory=list)
    by_version: dict[str, Verified] = msgspec.field(default_factory=dict)
    """By the version of the target's weights that verified the drafts."""
    rounds: int = 0
    round_trip_s: float = 0.0
    draft_s: float = 0.0
    queue_s: float = 0.0
    transfer_s: float = 0.0
    """Time of round trips that were waited for, less the drafter's compute and queue: wire and thread scheduling."""
    bytes_sent: int = 0
    handovers: int = 0
    """Hand-overs: requests that the drafter got together with earlier features."""
    handover_rows: int = 0
    handover_bytes: int = 0
    """Bytes of features handed over; part of `bytes_sent`."""
    ahead_hits: int = 0
    """With drafting ahead: verifications after which a draft for their outcome was available."""
    ahead_misses: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Drafts not used, by reason.

    `finished`: the request ended first; `late`: the request went on, with other text; `lost`: the deadline passed without it;
    `stale`: not asked for; `invalid`: undecodable, or tokens outside the vocabulary; `overflow`: the drafter's queue was full
    and the round was never sent.
    """


class Weights(msgspec.Struct, frozen=True):
    """Which weights of the target a verifier runs."""

    update: int = 0
    """The number of the update, counted over the fleet; 0: the weights of the start."""
    version: str = "0"
    """The name that the caller of the update gave them; without a name, the number of the update."""
    path: str | None = None
    """The directory they came from; None: the weights of the start, or weights that came as tensors."""


class VerifierStats(msgspec.Struct):
    """One verifier's cumulative counters and current load."""

    verifier_id: str
    started_at: float
    """Unix time in seconds."""
    mode: str
    num_speculative_tokens: int
    busy_s: float = 0.0
    idle_s: dict[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0))
    steps: int = 0
    verify_s: float = 0.0
    """Time of the target's forward pass and sampling, summed over steps."""
    decode_steps: int = 0
    """Steps without prefill."""
    decode_s: float = 0.0
    """Time of the steps without prefill, bookkeeping and sending included."""
    prefill_tokens: int = 0
    """Tokens computed besides one per request and its draft: prompts, and earlier output of moved requests."""
    prefill_s: float = 0.0
    """Time of the steps with prefill."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of these, tokens that the prefix cache had."""
    tokens: int = 0
    """Tokens emitted."""
    verifications: int = 0
    resumed: int = 0
    """Requests that came with tokens emitted by another verifier."""
    requests_finished: dict[str, int] = msgspec.field(default_factory=dict)
    """By vLLM's finish reason: `stop`, `length`, `abort`, `error`, ..."""
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    weights: Weights = Weights()
    paused: bool = False
    """Whether it sleeps, or its weights are being exchanged: requests and answers to pings wait."""
    tokens_in_flight: int = 0
    """Tokens held by running and waiting requests, prompts included."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0..1."""
    drafters: dict[str, DraftCounters] = msgspec.field(default_factory=dict)
    teacher_forced: DraftCounters = msgspec.field(default_factory=DraftCounters)
    """Verifications of fixed responses (rollouts): agreement with a trace; not counted in `drafters`."""
    drafters_down: list[str] = msgspec.field(default_factory=list)
    """Assigned drafters whose circuit breaker is open."""
    plan_k: int = 0
    """Longest draft asked of drafters, in tokens; 0: drafters are not asked."""
    plan_outcomes: int = 0
    """Outcomes drafted ahead of time per request."""
    plan_changes: int = 0
    """How often mode `auto` has changed between plain steps, drafting, and drafting ahead."""
    records_written: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows by kind; empty if nothing is recorded."""
    records_dropped: dict[str, int] = msgspec.field(default_factory=dict)
    connections_refused: int = 0
    """Connections from peers without the fleet's keys."""
    speed: Speed | None = None
    """The speed of steps without prefill; None before the first one."""
    plain_step_s: float = 0.0
    """Expected duration of a step over the running requests without drafts; 0: unknown."""
    drafted_step_s: float = 0.0
    """Expected duration with the draft tokens that are worth verifying; 0: unknown."""
    lookup_step_s: float = 0.0
    """Expected duration with drafts from prompt lookup only; 0: unknown, or no lookup."""
    lookup_length: float = 0.0
    """Expected tokens per request in that step."""

    @property
    def response_tokens(self) -> float:
        """Mean length, in tokens, of the responses that ended by a stop or their length limit."""
        ended = sum(count for reason, count in self.requests_finished.items() if reason in ("stop", "length"))
        return max(self.tokens / ended, 1.0) if ended else RESPONSE_TOKENS


class Learning(msgspec.Struct, frozen=True):
    """What a drafter that learns from live traffic has done so far."""

    version: int = 0
    """The head's version; 0: the head at the start."""
    steps: int = 0
    """All steps of training, those of earlier processes of the drafter included."""
    training_s: float = 0.0
    new_steps: int = 0
    """Steps of this process: a counter."""
    new_training_s: float = 0.0
    owed: int = 0
    """Rows of the replay ring still to be trained on, each counted as often as it will be used."""
    loss: float | None = None
    """The loss of the latest steps."""
    sequences: int = 0
    """Sequences put into the replay ring."""
    sequences_dropped: int = 0
    """Sequences not put there because the writer was behind."""
    present_length: float | None = None
    """Acceptance length of the current head on sequences not used for training (teacher-forced, greedy drafts)."""
    candidate_length: float | None = None
    """Acceptance length of the head in training on the same sequences."""
    live_acceptance: float | None = None
    """Share of recent live drafts whose first token was right."""
    previous_version: int = 0
    """The version that the present one is compared with."""
    previous_acceptance: float | None = None
    """Its live acceptance; None: not known."""
    published: int = 0
    taken_back: int = 0


class DrafterStats(msgspec.Struct):
    """One drafter's cumulative counters and current load."""

    drafter_id: str
    started_at: float
    rounds: int = 0
    rows: int = 0
    """Feature rows by which the cache was extended."""
    batches: int = 0
    """Batches that drafted something; a batch of mere prefill is not counted."""
    drafts: int = 0
    """Requests drafted for in these batches."""
    draft_s: float = 0.0
    """Time of these batches."""
    speed: Speed | None = None
    """Measured on these batches."""
    draft_tokens: int = 0
    busy_s: float = 0.0
    sequences: int = 0
    cache_usage: float = 0.0
    evictions: int = 0
    rejected: int = 0
    """Messages refused: undecodable, wrong version, wrong width."""
    connections_refused: int = 0
    """Connections from peers without the fleet's keys."""
    verifiers: list[str] = msgspec.field(default_factory=list)
    learning: Learning | None = None
    """None: the drafter does not learn."""
