"""The types of rows that records, rollouts and reports share.  Pure data, in any process.

The engine thread makes rows, a writer stores them (parquet while serving, CSV for rollouts), reports read them.  Fields `*_ms`
are milliseconds, fields `*_at` Unix seconds.  `step` is the verifier's count of steps since it started; it joins steps,
verifications and decisions of one verifier incarnation.
"""

import msgspec

REQUEST_ID_KEY = "outrider_request_id"
"""Key in `SamplingParams.extra_args` for the request id that a client wants in the rows.  It is needed because vLLM's front
half adds a random suffix to request ids.  Without this key, rows carry the engine's id, suffix included."""

LONGEST_REQUEST_ID = 200


class StepRow(msgspec.Struct, frozen=True):
    """One engine step that ran the target."""

    step: int
    began_at: float
    interval_ms: float
    """Time since the previous step began; 0 for the first step."""
    requests: int
    """Requests that emitted tokens in the step (the batch size)."""
    prefill_tokens: int
    """Prompt tokens computed in the step, and tokens recomputed after a preemption."""
    tokens: int
    """Tokens emitted: accepted draft tokens and the target's own token after them; tokens after a stop are not counted."""
    drafted: int
    """Verifications that had at least one draft token."""
    drafted_tokens: int
    """Tokens emitted by verifications with a draft: `drafted_tokens / drafted` is the step's acceptance length."""
    plan_k: int
    """Longest draft requested from drafters, in tokens per request; 0: no drafts were requested."""
    plan_outcomes: int
    """Outcomes per request for which drafts were requested ahead."""
    draft_ms: float
    """Longest drafter compute time of the rounds whose drafts the step verified; 0 in mode `native`."""
    verify_ms: float
    """The target's forward pass and sampling."""
    busy_ms: float
    """The whole step, scheduling and sending included, and handling of messages since the previous step.

    Busy and idle times of all rows add up to the wall time from the verifier's start to the end of the last step.
    """
    idle_ms: dict[str, float]
    """Idle milliseconds since the previous step, by cause."""
    waiting: int = 0
    """Requests that waited to enter the batch when the step ended."""
    kv_usage: float = 0.0
    """Share of the KV cache in use when the step ended, 0 to 1."""


class VerificationRow(msgspec.Struct, frozen=True, gc=False):
    """One request's outcome in one step.  A request's first token, sampled by its prefill, has a row too, without a draft."""

    step: int
    request_id: str
    base_len: int
    """Tokens of the request before this step, prompt included."""
    draft_tokens: int
    accepted: int
    """Accepted draft tokens, before truncation at a stop; in mode `native`, those that vLLM accepted."""
    tokens: int
    """Tokens emitted, after truncation at a stop."""
    drafter: str
    """Id of the drafter; empty without a draft."""
    ahead: bool
    """Whether the draft was made ahead, during the previous verification."""
    teacher_forced: bool
    """Whether the response was fixed: then acceptance measures agreement with a trace, not with the target."""


class RequestRow(msgspec.Struct, gc=False):
    """One sequence at one verifier, complete when it ends there.  A sequence that moves to another verifier has two rows."""

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
    """Response tokens emitted at other verifiers before the sequence came here; `tokens` counts those emitted here."""


class DecisionRow(msgspec.Struct, frozen=True, gc=False):
    """One change of mode `auto` between plain steps, drafting, and drafting ahead, with the estimates behind it.

    Estimates are for the new plan, per request and step unless a field says otherwise.
    """

    step: int
    at: float
    requests: int
    plan_k: int
    plan_outcomes: int
    tokens_per_s: float
    """Expected tokens per second of all requests together."""
    verify_s: float
    """Expected seconds of a plain step."""
    drafted_tokens: float
    """Draft tokens expected to be verified (unlike `StepRow.drafted_tokens`, which counts emitted tokens)."""
    acceptance_length: float
    """Tokens expected per verification."""
    hit_rate: float
    """Expected share of verifications for whose outcome a draft made ahead arrives in time."""


Row = StepRow | VerificationRow | RequestRow | DecisionRow


def name_for_records(request_id: str, extra_args: dict[str, object] | None) -> str:
    """The id in a request's rows: the one its client sent under `REQUEST_ID_KEY`, else the engine's."""
    own = extra_args.get(REQUEST_ID_KEY) if extra_args else None
    return own[:LONGEST_REQUEST_ID] if isinstance(own, str) and own else request_id
