"""The counters that verifiers and drafters report.  Pure data, in any process.

Members report to the coordinator a few times a second.  A verifier also sends its `VerifierStats` directly to every connected
gateway, so metrics do not depend on the coordinator.  Counters are cumulative since the process started (`started_at`).

A field that is a metric is annotated with it, and its docstring is the metric's help.  Those of `DraftCounters` count per
drafter: `counters.drafter(id).FIELD += n` (`backend/engine/counting.py`).
"""

from typing import Annotated

import msgspec

from backend.fleet.metric import Metric
from backend.fleet.speed import RESPONSE_TOKENS, Speed

IDLE_CAUSES = ("no_work", "awaiting_draft", "swap")

LOOKUP = "lookup"
"""A verifier's own look-ups (`speculation/texts.py`), as an id in `VerifierStats.drafters`."""


VERSIONS = 4
"""Versions of the weights that are counted separately: the newest."""


class Verified(msgspec.Struct):
    """Counts of verified drafts."""

    drafts: Annotated[int, Metric("outrider_drafts_by_version_total")] = 0
    """Drafted verifications, by the version of the target's weights; the newest four."""
    draft_tokens: Annotated[int, Metric("outrider_draft_tokens_by_version_total")] = 0
    """Draft tokens verified by them."""
    accepted_tokens: Annotated[int, Metric("outrider_accepted_tokens_by_version_total")] = 0
    """Draft tokens kept by them."""


class DraftCounters(msgspec.Struct):
    """One verifier's counts of one drafter.  "native" and "ngram" are vLLM's own co-located proposers."""

    drafts: Annotated[int, Metric("outrider_drafts_total")] = 0
    """Verifications that had at least one draft token."""
    draft_tokens: Annotated[int, Metric("outrider_draft_tokens_total")] = 0
    """Draft tokens verified."""
    accepted_tokens: Annotated[int, Metric("outrider_accepted_tokens_total")] = 0
    """Draft tokens kept, those behind an answer's end included."""
    drafted_by_position: Annotated[list[int], Metric("outrider_draft_tokens_by_position_total", labels=("position",))] = []
    """Draft tokens verified at each position, from 0."""
    accepted_by_position: Annotated[list[int], Metric("outrider_accepted_tokens_by_position_total", labels=("position",))] = []
    """Draft tokens kept at each position, from 0."""
    by_version: dict[str, Verified] = msgspec.field(default_factory=dict)
    """By the version of the target's weights that verified the drafts."""
    rounds: Annotated[int, Metric("outrider_draft_rounds_total")] = 0
    """Draft proposals received."""
    round_trip_s: Annotated[float, Metric("outrider_draft_round_trip_seconds_total")] = 0.0
    """Time from asking to having the draft, summed over rounds."""
    draft_s: Annotated[float, Metric("outrider_draft_compute_seconds_total")] = 0.0
    """The drafter's own compute, summed over rounds."""
    queue_s: Annotated[float, Metric("outrider_draft_queue_seconds_total")] = 0.0
    """Time waiting at the drafter, summed over rounds."""
    transfer_s: Annotated[float, Metric("outrider_draft_transfer_seconds_total")] = 0.0
    """Round trip less the drafter's compute and queue, summed over rounds that were waited for."""
    bytes_sent: Annotated[int, Metric("outrider_draft_sent_bytes_total")] = 0
    """Bytes sent to the drafter."""
    handovers: Annotated[int, Metric("outrider_handovers_total")] = 0
    """Running requests given to the drafter with their earlier features."""
    handover_rows: Annotated[int, Metric("outrider_handover_rows_total")] = 0
    """Those features, in positions."""
    handover_bytes: Annotated[int, Metric("outrider_handover_bytes_total")] = 0
    """Those features, in bytes (part of the bytes sent)."""
    ahead_hits: Annotated[int, Metric("outrider_ahead_hits_total")] = 0
    """Draft at hand after a verification, drafting ahead."""
    ahead_misses: Annotated[int, Metric("outrider_ahead_misses_total")] = 0
    """No draft at hand after a verification, drafting ahead."""
    dropped: Annotated[dict[str, int], Metric("outrider_drafts_dropped_total", labels=("reason",))] = {}
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
    num_speculative_tokens: Annotated[int, Metric("outrider_verifier_num_speculative_tokens")]
    """The longest draft, in tokens (K)."""
    busy_s: Annotated[float, Metric("outrider_verifier_busy_seconds_total")] = 0.0
    """Time in steps and other work; busy + idle = wall."""
    idle_s: Annotated[dict[str, float], Metric("outrider_verifier_idle_seconds_total", labels=("cause",))] = msgspec.field(
        default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0.0)
    )
    """Time the verifier could have computed but did not, by cause."""
    steps: Annotated[int, Metric("outrider_verifier_steps_total")] = 0
    """Engine steps."""
    verify_s: Annotated[float, Metric("outrider_verifier_verify_seconds_total")] = 0.0
    """Target forward and sampling."""
    prefill_tokens: Annotated[int, Metric("outrider_verifier_prefill_tokens_total")] = 0
    """Tokens of prompts, and of what moved sequences bring along, that were computed."""
    prefill_s: Annotated[float, Metric("outrider_verifier_prefill_seconds_total")] = 0.0
    """Time in steps with prefill."""
    prompt_tokens: Annotated[int, Metric("outrider_verifier_prompt_tokens_total")] = 0
    """Prompt tokens of sequences that began decoding."""
    cached_tokens: int = 0
    """Of these, tokens that the prefix cache had."""
    tokens: Annotated[int, Metric("outrider_verifier_tokens_total")] = 0
    """Tokens emitted."""
    verifications: Annotated[int, Metric("outrider_verifier_verifications_total")] = 0
    """Sequences verified, summed over steps."""
    resumed: Annotated[int, Metric("outrider_verifier_resumed_total")] = 0
    """Sequences that went on here with tokens emitted elsewhere."""
    requests_finished: Annotated[dict[str, int], Metric("outrider_verifier_requests_finished_total", labels=("reason",))] = {}
    """Sequences finished, by vLLM's finish reason."""
    preemptions: Annotated[int, Metric("outrider_verifier_preemptions_total")] = 0
    """Sequences preempted for KV cache space."""
    running: Annotated[int, Metric("outrider_verifier_running")] = 0
    """Sequences in the batch."""
    waiting: Annotated[int, Metric("outrider_verifier_waiting")] = 0
    """Sequences waiting to enter the batch."""
    weights: Weights = Weights()
    paused: bool = False
    """Whether it sleeps, or weights or an adapter are being loaded: requests and answers to pings wait."""
    tokens_in_flight: Annotated[int, Metric("outrider_verifier_tokens_in_flight")] = 0
    """Tokens of running and waiting sequences."""
    kv_usage: Annotated[float, Metric("outrider_verifier_kv_cache_usage")] = 0.0
    """Share of the KV cache in use, 0 to 1."""
    drafters: dict[str, DraftCounters] = msgspec.field(default_factory=dict)
    teacher_forced: DraftCounters = msgspec.field(default_factory=DraftCounters)
    """Verifications of fixed responses (rollouts): agreement with a trace; not counted in `drafters`."""
    drafters_down: list[str] = msgspec.field(default_factory=list)
    """Assigned drafters whose circuit breaker is open."""
    plan_k: Annotated[int, Metric("outrider_verifier_plan_k")] = 0
    """Draft tokens asked of drafters per request at most, 0 to K; 0: they are not asked."""
    plan_outcomes: int = 0
    """Outcomes drafted ahead of time per request."""
    plan_changes: Annotated[int, Metric("outrider_verifier_plan_changes_total")] = 0
    """Times mode auto has changed between plain steps, drafting, and drafting ahead."""
    records_written: Annotated[dict[str, int], Metric("outrider_records_written_total", labels=("kind",))] = {}
    """Rows of records written to disk: `step`, `verification`, `request`, `decision`."""
    records_dropped: Annotated[dict[str, int], Metric("outrider_records_dropped_total", labels=("kind",))] = {}
    """Rows of records lost: the queue was full, or the disk took no more."""
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

    version: Annotated[int, Metric("outrider_learning_version")] = 0
    """Version of the drafter's head; 0: the one it began with."""
    steps: int = 0
    """All steps of training, those of earlier processes of the drafter included."""
    training_s: float = 0.0
    """Their time.  What follows counts this process alone."""
    new_steps: Annotated[int, Metric("outrider_learning_steps_total")] = 0
    """Steps its head was trained for."""
    new_training_s: Annotated[float, Metric("outrider_learning_seconds_total")] = 0.0
    """Time they took."""
    owed: int = 0
    """Rows of the replay ring still to be trained on, each counted as often as it will be used."""
    loss: float | None = None
    """The loss of the latest steps."""
    sequences: Annotated[int, Metric("outrider_learning_sequences_total")] = 0
    """Sequences put into its replay ring."""
    sequences_dropped: Annotated[int, Metric("outrider_learning_sequences_dropped_total")] = 0
    """Sequences its writer had no time for."""
    present_length: float | None = None
    """Acceptance length of the current head on sequences not used for training (teacher-forced, greedy drafts)."""
    candidate_length: float | None = None
    """Acceptance length of the head in training on the same sequences."""
    live_acceptance: Annotated[float | None, Metric("outrider_learning_live_acceptance")] = None
    """Share of drafts whose first token was right, lately; a mean over sequences."""
    previous_version: int = 0
    """The version that the present one is compared with."""
    previous_acceptance: float | None = None
    """Its live acceptance; None: not known."""
    published: Annotated[int, Metric("outrider_learning_published_total")] = 0
    """Heads that it has put in place."""
    taken_back: Annotated[int, Metric("outrider_learning_taken_back_total")] = 0
    """Heads that it has taken back."""


class DrafterStats(msgspec.Struct):
    """One drafter's cumulative counters and current load."""

    drafter_id: str
    started_at: float
    batches: Annotated[int, Metric("outrider_drafter_batches_total")] = 0
    """Batches that drafted."""
    drafts: Annotated[int, Metric("outrider_drafter_drafts_total")] = 0
    """Requests drafted for, summed over batches."""
    draft_s: Annotated[float, Metric("outrider_drafter_draft_seconds_total")] = 0.0
    """Time of batches that drafted; other busy time reads prompts or drafts ahead."""
    speed: Speed | None = None
    """Measured on these batches."""
    draft_tokens: int = 0
    busy_s: Annotated[float, Metric("outrider_drafter_busy_seconds_total")] = 0.0
    """Time in which the drafter computed; otherwise it is idle."""
    sequences: Annotated[int, Metric("outrider_drafter_sequences")] = 0
    """Sequences in its KV cache."""
    cache_usage: Annotated[float, Metric("outrider_drafter_kv_cache_usage")] = 0.0
    """Share of its KV cache in use, 0 to 1."""
    evictions: Annotated[int, Metric("outrider_drafter_evictions_total")] = 0
    """Sequences removed from its KV cache to make room."""
    rejected: Annotated[int, Metric("outrider_drafter_rejected_total")] = 0
    """Messages refused: undecodable, another version, another width."""
    connections_refused: int = 0
    """Connections from peers without the fleet's keys."""
    verifiers: list[str] = msgspec.field(default_factory=list)
    learning: Learning | None = None
    """None: the drafter does not learn."""
