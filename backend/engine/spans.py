"""A verifier's spans: one per traced request, with child spans for queueing, prefill and decoding.  Engine thread.

Drafters' spans are children of the verifier's span.  Its context reaches the worker in the request's sampling parameters
(`extra_args`, which vLLM does not interpret).  The worker opens the request on a drafter with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from backend.tracing import Span, Tracing

TRACE_ARGUMENT = "outrider_traceparent"


@dataclass
class _Request:
    span: Span
    began_ns: int
    scheduled_ns: int = 0
    first_ns: int = 0
    tokens: int = 0
    verifications: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    drafters: set[str] = field(default_factory=set)


class EngineSpans:
    """Follows the traced requests of one verifier."""

    def __init__(self, tracing: Tracing, verifier_id: str) -> None:
        self._tracing = tracing
        self._verifier_id = verifier_id
        self._requests: dict[str, _Request] = {}

    def began(self, request: Any) -> None:
        """Starts the span of a traced request that vLLM's scheduler has taken in."""
        if not request.trace_headers:
            return
        now = time.time_ns()
        span = self._tracing.start("verifier", request.trace_headers, start_ns=now)
        if span is None:
            return
        span.set(
            {
                "outrider.verifier": self._verifier_id,
                "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
                "outrider.resumed_tokens": request.num_output_tokens,
            }
        )
        self._requests[request.request_id] = _Request(span, now)
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), TRACE_ARGUMENT: span.headers["traceparent"]}

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Notes a step's requests; a request's first step ends its queueing."""
        for request_id in request_ids:
            known = self._requests.get(request_id)
            if known is not None and not known.scheduled_ns:
                known.scheduled_ns = time.time_ns()

    def verified(self, request_id: str, drafted: int, accepted: int, drafter_id: str) -> None:
        """Counts one verification (`drafted` 0: without a draft)."""
        known = self._requests.get(request_id)
        if known is None:
            return
        known.verifications += 1
        if drafted:
            known.drafts += 1
            known.drafted += drafted
            known.accepted += accepted
            known.drafters.add(drafter_id)

    def emitted(self, request_id: str, tokens: int) -> None:
        """Counts tokens sent to the gateway; the first ones end the prefill."""
        known = self._requests.get(request_id)
        if known is not None:
            known.first_ns = known.first_ns or time.time_ns()
            known.tokens += tokens

    def ended(self, request_id: str, reason: str) -> None:
        """Ends the span of a request that has finished or was aborted."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return
        now = time.time_ns()
        known.span.child("queue", known.began_ns, known.scheduled_ns or now)
        if known.scheduled_ns:
            known.span.child("prefill", known.scheduled_ns, known.first_ns or now)
        if known.first_ns:
            known.span.child("decode", known.first_ns, now, _decoding(known))
        known.span.set({"gen_ai.usage.completion_tokens": known.tokens, "outrider.finish_reason": reason})
        known.span.end(now, failed="error" if reason == "error" else "")


def _decoding(known: _Request) -> dict[str, str | int | float]:
    summary: dict[str, str | int | float] = {
        "outrider.verifications": known.verifications,
        "outrider.drafts": known.drafts,
        "outrider.draft_tokens": known.drafted,
        "outrider.accepted_tokens": known.accepted,
        "outrider.drafters": ",".join(sorted(known.drafters)),
    }
    if known.drafts:
        summary["outrider.acceptance_length"] = 1 + known.accepted / known.drafts
    return summary
