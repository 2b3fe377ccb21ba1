"""A drafter's tracing spans: one per traced request, from `Open` to `Close`, with the time spent drafting.  Drafter thread.

Rounds are many and short.  They have no spans of their own, but are summed up in the request's span.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass

from backend.tracing import Span, Tracing


@dataclass
class _Request:
    span: Span
    batches: int = 0
    drafted: int = 0
    drafting_s: float = 0.0
    outcomes: int = 0
    imagining_s: float = 0.0


class DraftSpans:
    """The spans of one drafter's traced requests; without `tracing` there are none."""

    def __init__(self, tracing: Tracing | None, drafter_id: str) -> None:
        self._tracing = tracing
        self._drafter_id = drafter_id
        self._requests: dict[Hashable, _Request] = {}

    def opened(self, key: tuple[str, int, str], traceparent: str) -> None:
        """A request was opened on this drafter, perhaps again."""
        self.closed(key, "reopened")
        if self._tracing is None or not traceparent:
            return
        span = self._tracing.start("drafter", {"traceparent": traceparent})
        if span is not None:
            span.set({"outrider.drafter": self._drafter_id, "outrider.verifier": key[0]})
            self._requests[key] = _Request(span)

    def drafted(self, key: Hashable, tokens: int, spent_s: float) -> None:
        """A request got a draft of so many tokens, in a batch that took `spent_s`."""
        known = self._requests.get(key)
        if known is not None:
            known.batches += 1
            known.drafted += tokens
            known.drafting_s += spent_s

    def imagined(self, key: Hashable, outcomes: int, spent_s: float) -> None:
        """So many of a request's outcomes were drafted ahead, in a batch that took `spent_s`."""
        known = self._requests.get(key)
        if known is not None:
            known.outcomes += outcomes
            known.imagining_s += spent_s

    def closed(self, key: Hashable, reason: str) -> None:
        """Ends a request's span; `reason` becomes an attribute."""
        known = self._requests.pop(key, None)
        if known is None:
            return
        known.span.set(
            {
                "outrider.batches": known.batches,
                "outrider.draft_tokens": known.drafted,
                "outrider.drafting_ms": round(known.drafting_s * 1000, 3),
                "outrider.outcomes": known.outcomes,
                "outrider.imagining_ms": round(known.imagining_s * 1000, 3),
                "outrider.close_reason": reason,
            }
        )
        known.span.end(time.time_ns())
