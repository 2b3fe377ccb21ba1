"""A verifier's spans: one per traced request, with child spans for queueing, prefill and decoding.  Engine thread.

Drafters' spans are children of the verifier's span.  Its context reaches the worker in the request's sampling parameters
(`extra_args`, which vLLM does not interpret).  The worker opens the request on a drafter with it.
"""

import time
from typing import Any

from backend.engine.observers import Observer, Trace, Verification, open_account
from backend.tracing import Tracing
from backend.wire.engine import Account

TRACE_ARGUMENT = "outrider_traceparent"


class EngineSpans(Observer):
    """Follows the traced requests of one verifier."""

    def __init__(self, tracing: Tracing, verifier_id: str) -> None:
        self._tracing = tracing
        self._verifier_id = verifier_id

    def began(self, request: Any) -> None:
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
        request.outrider.trace = Trace(span, now)
        open_account(request.request_id, request.outrider)
        params = request.sampling_params
        params.extra_args = {**(params.extra_args or {}), TRACE_ARGUMENT: span.headers["traceparent"]}

    def scheduled(self, request: Any) -> None:
        """The request's first step ends its queueing."""
        trace: Trace | None = request.outrider.trace
        if trace is not None:
            trace.scheduled_ns = trace.scheduled_ns or time.time_ns()

    def verified(self, verification: Verification, tokens: int, waited_s: float) -> None:
        """The request's first tokens end its prefill."""
        trace: Trace | None = verification.request.outrider.trace
        if trace is not None:
            trace.first_ns = trace.first_ns or time.time_ns()

    def ended(self, request: Any, reason: str) -> None:
        trace: Trace | None = request.outrider.trace
        if trace is None:
            return
        now, account = time.time_ns(), request.outrider.account
        trace.span.child("queue", trace.began_ns, trace.scheduled_ns or now)
        if trace.scheduled_ns:
            trace.span.child("prefill", trace.scheduled_ns, trace.first_ns or now)
        if trace.first_ns:
            trace.span.child("decode", trace.first_ns, now, _decoding(account))
        trace.span.set({"gen_ai.usage.completion_tokens": account.tokens, "outrider.finish_reason": reason})
        trace.span.end(now, failed="error" if reason == "error" else "")


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
