"""A drafter's tracing spans: one per traced request, from `Open` to `Close`, with the time spent drafting.  Drafter thread.

Rounds are many and short.  They have no spans of their own, but are summed up in the request's span.
"""

import time
from collections.abc import Hashable

from backend.tracing import Span, Tracing


class DraftSpans:
    """The spans of one drafter's traced requests; without `tracing` there are none."""

    def __init__(self, tracing: Tracing | None, drafter_id: str) -> None:
        self._tracing = tracing
        self._drafter_id = drafter_id
        self._requests: dict[Hashable, tuple[Span, dict[str, float]]] = {}
        """Each request's span, and the sums that become attributes when it ends."""

    def opened(self, key: tuple[str, int, str], traceparent: str) -> None:
        """A request was opened on this drafter, perhaps again."""
        self.closed(key, "reopened")
        if self._tracing is None or not traceparent:
            return
        span = self._tracing.start("drafter", {"traceparent": traceparent})
        if span is not None:
            span.set({"outrider.drafter": self._drafter_id, "outrider.verifier": key[0]})
            nothing = {"batches": 0, "draft_tokens": 0, "drafting_ms": 0.0, "outcomes": 0, "imagining_ms": 0.0}
            self._requests[key] = span, nothing

    def drafted(self, key: Hashable, tokens: int, spent_s: float) -> None:
        """A request got a draft of so many tokens, in a batch that took `spent_s`."""
        self._add(key, batches=1, draft_tokens=tokens, drafting_ms=1000 * spent_s)

    def imagined(self, key: Hashable, outcomes: int, spent_s: float) -> None:
        """So many of a request's outcomes were drafted ahead, in a batch that took `spent_s`."""
        self._add(key, outcomes=outcomes, imagining_ms=1000 * spent_s)

    def closed(self, key: Hashable, reason: str) -> None:
        """Ends a request's span; `reason` becomes an attribute."""
        span, sums = self._requests.pop(key, (None, {}))
        if span is not None:
            span.set({f"outrider.{name}": round(value, 3) for name, value in sums.items()})
            span.set({"outrider.close_reason": reason})
            span.end(time.time_ns())

    def _add(self, key: Hashable, **more: float) -> None:
        if key in self._requests:
            sums = self._requests[key][1]
            for name, value in more.items():
                sums[name] += value
