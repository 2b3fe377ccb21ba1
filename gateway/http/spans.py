"""The gateway's spans: one per HTTP request, one per sequence.  Runs in the event loop, only if tracing is on."""

import time

from starlette.datastructures import MutableHeaders
from starlette.types import Scope

from backend.tracing import Span, Tracing
from gateway.auth.rights import Right, right_of
from gateway.fleet.sequences import InFlight
from gateway.fleet.statistics import Cut
from gateway.metrics.gateway import GatewayMetrics


def begin_span(tracing: Tracing, scope: Scope) -> Span | None:
    """The server span of a request; None: this trace is not recorded.

    The span continues the client's trace and replaces the header `traceparent` by its own.  So later spans lie below it: vLLM's
    serving classes take the context of an engine request from the headers.
    """
    headers = MutableHeaders(scope=scope)
    given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    span = tracing.start(scope["method"], given, "server")
    for name in given:
        # Also where nothing is recorded: without the headers, no other process begins a trace of its own.
        del headers[name]
    headers.update(span.headers if span is not None else {})
    return span


def end_span(span: Span, scope: Scope, status: int) -> None:
    """Ends the span, except of a probe, a scrape or a page: what is not ended is not exported."""
    route = scope.get("route")
    if route is not None and right_of(route) in (Right.NOTHING, Right.METRICS):
        return
    path = getattr(route, "path", "unmatched")
    span.rename(f"{scope['method']} {path}")
    span.set({"http.request.method": scope["method"], "http.route": path, "http.response.status_code": status})
    span.set({"outrider.request_id": scope["state"]["request_id"]})
    span.end(failed=str(status) if status >= 500 else "")


class TracedMetrics(GatewayMetrics):
    """Metrics, and a span per sequence, from arrival to end."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__()
        self._tracing = tracing
        self._spans: dict[str, Span] = {}

    def on_tokens(self, sequence: InFlight, now: float) -> None:
        super().on_tokens(sequence, now)
        if sequence.first_token is None and (span := self._span(sequence)) is not None:
            span.event("first token", _where(sequence))

    def on_moved(self, sequence: InFlight, cut: Cut) -> None:
        super().on_moved(sequence, cut)
        if (span := self._span(sequence)) is not None:
            span.event(cut.kind, {**_where(sequence), "outrider.cause": cut.cause, "outrider.tokens": len(sequence.emitted)})

    def on_finished(self, sequence: InFlight, reason: str) -> None:
        super().on_finished(sequence, reason)
        span = self._span(sequence)
        if span is None:
            return
        del self._spans[sequence.request.request_id]
        span.set(
            {
                **_where(sequence),
                "gen_ai.usage.prompt_tokens": len(sequence.request.prompt_token_ids or ()),
                "gen_ai.usage.completion_tokens": sequence.emitted_tokens,
                "outrider.finish_reason": reason,
                "outrider.places": sequence.places,
            }
        )
        span.end(failed=reason if reason in ("lost", "poisoned", "error") else "")

    def _span(self, sequence: InFlight) -> Span | None:
        """The sequence's span, made at the first event but begun at the arrival; None: the trace is not recorded."""
        request = sequence.request
        span = self._spans.get(request.request_id)
        if span is None and request.trace_headers:
            start_ns = time.time_ns() - round((time.monotonic() - sequence.arrived) * 1e9)
            span = self._tracing.start("sequence", request.trace_headers, start_ns=start_ns)
            if span is not None:
                self._spans[request.request_id] = span
        return span


def _where(sequence: InFlight) -> dict[str, str]:
    return {"outrider.verifier": sequence.link.member.id} if sequence.link is not None else {}
