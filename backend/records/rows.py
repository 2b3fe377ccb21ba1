"""The rows that records, rollouts and reports share.  Pure data, in any process.

The engine thread makes them, a writer keeps them (parquet while serving, CSV for rollouts), reports read them back.  Times in
`*_ms` are milliseconds, `*_at` Unix seconds.  `step` is the verifier's own count of steps since it started: the key that joins
steps, verifications and decisions of one verifier incarnation.
"""

from __future__ import annotations

import msgspec

REQUEST_ID_KEY = "outrider_request_id"
"""In `SamplingParams.extra_args`: the name a client gives its request, under which its rows are kept.  vLLM's front half adds a
random suffix to request ids; this one arrives as it was sent.  Without it rows carry the id the engine knows."""

LONGEST_REQUEST_ID = 200


class StepRow(msgspec.Struct, frozen=True):
    """One engine step that ran the target."""

    step: int
    began_at: float
    interval_ms: float
    """Since the step before began; 0 for the first."""
    requests: int
    """Requests that emitted tokens in it (the batch size)."""
    prefill_tokens: int
    """Prompt tokens computed in it, and tokens computed once more after a preemption."""
    tokens: int
    """Tokens emitted: accepted draft tokens and the one after them, after stop truncation."""
    drafted: int
    """Verifications that had at least one draft token."""
    drafted_tokens: int
    """Tokens emitted by those: `drafted_tokens / drafted` is the step's acceptance length."""
    plan_k: int
    """Draft tokens asked of drafters per request at most; 0: they were not asked."""
    plan_outcomes: int
    """Outcomes drafted ahead of time per request."""
    draft_ms: float
    """Drafter compute of the longest round whose drafts this step verified; 0 for drafts that vLLM makes itself."""
    verify_ms: float
    """Target forward and sampling."""
    busy_ms: float
    """All of the step, scheduling and sending included, and the messages handled since the step before.

    Busy and idle time of all rows add up to the wall time from the verifier's start to the end of the last step.
    """
    idle_ms: dict[str, float]
    """Idle time since the step before, by cause."""
    waiting: int = 0
    """Requests that waited to enter the batch at its end."""
    kv_usage: float = 0.0
    """Share of the KV cache in use at its end."""


class VerificationRow(msgspec.Struct, frozen=True, gc=False):
    """One request's outcome in one step; the first token of a request, sampled by its prefill, is one without a draft."""

    step: int
    request_id: str
    base_len: int
    """Tokens the request had before, prompt included."""
    draft_tokens: int
    accepted: int
    """Draft tokens that equal the verifier's own, before stop truncation; in mode `native`, those that vLLM kept."""
    tokens: int
    """Tokens emitted, after stop truncation."""
    drafter: str
    """Who drafted; empty without a draft."""
    ahead: bool
    """Drafted ahead of time."""
    teacher_forced: bool
    """The response was fixed: acceptance measures agreement with a trace, not with the target."""


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence at one verifier, written when it ends there: one that moves to another verifier has a row at each."""

    request_id: str
    arrived_at: float
    first_token_at: float
    ended_at: float
    prompt_tokens: int
    tokens: int
    verifications: int
    draft_tokens: int
    accepted: int
    finish_reason: str
    teacher_forced: bool
    brought_tokens: int = 0
    """Response tokens it came with from another verifier; `tokens` are those emitted here."""


class DecisionRow(msgspec.Struct, frozen=True, gc=False):
    """One change of mode `auto` between plain steps, drafting, and drafting ahead, with what it was made from.

    What is expected is per request and step, of the new plan.
    """

    step: int
    at: float
    requests: int
    plan_k: int
    plan_outcomes: int
    tokens_per_s: float
    """Expected, of all requests."""
    verify_s: float
    """A plain step."""
    drafted_tokens: float
    """Draft tokens expected to be verified; in a step's row, `drafted_tokens` is what was emitted."""
    acceptance_length: float
    """Tokens expected per verification."""
    hit_rate: float
    """Share of verifications whose outcome is expected to have been drafted ahead, in time."""


Row = StepRow | VerificationRow | RequestRow | DecisionRow


def name_for_records(request_id: str, extra_args: dict[str, object] | None) -> str:
    """The id a request's rows carry: its client's own where one was sent, else the engine's."""
    own = extra_args.get(REQUEST_ID_KEY) if extra_args else None
    return own[:LONGEST_REQUEST_ID] if isinstance(own, str) and own else request_id
