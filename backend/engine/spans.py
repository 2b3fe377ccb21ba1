"""A verifier's spans: one per traced request, with child spans for queueing, prefill and decoding.  Engine thread.

Drafters' spans are children of the verifier's span.  Its context reaches the worker in the request's sampling parameters
(`extra_args`, which vLLM does not interpret).  The worker opens the request on a drafter with it.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from backend.tracing import Span, Tracing
from backend.wire.engine import Account

TRACE_ARGUMENT = "outrider_traceparent"


@dataclass
class _Request:
    span: Span
    began_ns: int
    scheduled_ns: int = 0
    first_ns: int = 0


class EngineSpans:
    """Follows the traced requests of one verifier."""

    def __init__(self, tracing: Tracing, verifier_id: str) -> None:
        self._tracing = tracing
        self._verifier_id = verifier_id
        self._requests: dict[str, _Request] = {}

    def began(self, request: Any) -> bool:
        """Starts the span of a request that vLLM's scheduler has taken in; returns whether the request is traced."""
        if not request.trace_headers:
            return False
        now = time.time_ns()
        span = self._tracing.start("verifier", request.trace_headers, start_ns=now)
        if span is None:
            return False
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
        return True

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """Notes a step's requests; a request's first step ends its queueing."""
        for request_id in request_ids:
            known = self._requests.get(request_id)
            if known is not None and not known.scheduled_ns:
                known.scheduled_ns = time.time_ns()

    def emitted(self, request_id: str) -> None:
        """Notes tokens sent to the gateway; the first ones end the prefill."""
        known = self._requests.get(request_id)
        if known is not None:
            known.first_ns = known.first_ns or time.time_ns()

    def ended(self, account: Account, reason: str) -> None:
        """Ends the span of a request that has finished or was aborted."""
        known = self._requests.pop(account.request_id, None)
        if known is None:
            return
        now = time.time_ns()
        known.span.child("queue", known.began_ns, known.scheduled_ns or now)
        if known.scheduled_ns:
            known.span.child("prefill", known.scheduled_ns, known.first_ns or now)
        if known.first_ns:
            known.span.child("decode", known.first_ns, now, _decoding(account))
        known.span.set({"gen_ai.usage.completion_tokens": account.tokens, "outrider.finish_reason": reason})
        known.span.end(now, failed="error" if reason == "error" else "")


def _decoding(account: Account) -> dict[str, str | int | float]:
    drafts = sum(each.drafts for each in account.tallies)
    accepted = sum(each.accepted for each in account.tallies)
    summary: dict[str, str | int | float] = {
        "outrider.verifications": account.verifications,
        "outrider.drafts": drafts,
        "outrider.draft_tokens": sum(each.drafted for each in account.tallies),
        "outrider.accepted_tokens": accepted,
        "outrider.drafters": ",".join(sorted({each.drafter for each in account.tallies})),
    }
    if drafts:
        summary["outrider.acceptance_length"] = 1 + accepted / drafts
    return summary
