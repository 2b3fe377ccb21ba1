"""Traces of requests through gateway, verifier and drafter, with OpenTelemetry.  Any process; no other package imports it.

Without `tracing.endpoint` tracing is off: `open_tracing` returns None, and OpenTelemetry is not imported.  If on, each process
exports its spans over OTLP/HTTP from a separate thread.  If the collector is slow or gone, only spans are lost.  The W3C trace
context connects a request's spans.  It travels in HTTP headers, in vLLM's `trace_headers`, and in `Open` on the drafting wire.
Whether a trace is kept is decided once, where it begins.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from backend.config.settings import TracingSettings
from backend.config.sources import ConfigError

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

Kind = Literal["server", "internal"]
Value = str | int | float | bool
CLOSE_S = 2.0
"""Seconds that a process may spend at its end on sending its last spans."""

logger = logging.getLogger(__name__)

MISSING = "tracing.endpoint is set, but OpenTelemetry is not installed; docs/operate/tracing.md names its packages"


def check(settings: TracingSettings) -> None:
    """Raises `ConfigError` if tracing is on and its packages are missing."""
    if settings.endpoint is not None:
        _exporter()


def open_tracing(settings: TracingSettings, role: str, instance: str) -> Tracing | None:
    """This process's tracing; None if it is off.  `role` is gateway, verifier or drafter.  Raises `ConfigError`."""
    if settings.endpoint is None:
        return None
    return Tracing(role, instance, _exporter()(endpoint=settings.endpoint, timeout=CLOSE_S))


def _exporter() -> type[OTLPSpanExporter]:
    """The exporter's class.  It needs all packages of OpenTelemetry that are used here."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(MISSING) from error
    return OTLPSpanExporter


class _Once(logging.Handler):
    """Logs OpenTelemetry's first warning in one line and drops the rest, which are a traceback per failed export."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._warned:
            self._warned = True
            reason = " ".join(record.getMessage().split())[:200]
            logger.warning("spans are lost (further losses are not logged): %s", reason)


def _tell_once() -> None:
    theirs = logging.getLogger("opentelemetry")
    if not any(isinstance(handler, _Once) for handler in theirs.handlers):
        theirs.addHandler(_Once())
        theirs.propagate = False


class Tracing:
    """Starts spans.  `exporter` is an OpenTelemetry exporter; tests pass one that keeps spans in memory.

    OpenTelemetry's own setting `OTEL_TRACES_SAMPLER` decides which traces are kept.
    """

    def __init__(self, role: str, instance: str, exporter: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._library = trace
        self._contexts = TraceContextTextMapPropagator()
        version = importlib.metadata.version("outrider")
        about = {"service.name": f"outrider-{role}", "service.instance.id": instance, "service.version": version}
        # Not the library's global provider: a process may have several `Tracing` objects, and vLLM has its own.
        self._provider = TracerProvider(resource=Resource(about), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=1000, export_timeout_millis=CLOSE_S * 1000)
        )
        self._tracer = self._provider.get_tracer("outrider", version)
        _tell_once()

    def start(
        self, name: str, headers: Mapping[str, str] | None, kind: Kind = "internal", start_ns: int | None = None
    ) -> Span | None:
        """Starts a span below the context in `headers`, or a new trace without a context; None if the trace is not kept.

        A malformed context counts as none.
        """
        context = self._contexts.extract(dict(headers or {}))
        span = self._tracer.start_span(name, context=context, kind=self._library.SpanKind[kind.upper()], start_time=start_ns)
        return Span(self, span) if span.is_recording() else None

    def close(self) -> None:
        """Sends the remaining spans, within `CLOSE_S`."""
        self._provider.force_flush(int(CLOSE_S * 1000))
        self._provider.shutdown()


class Span:
    """A span of a trace that is kept.  Attributes may be numbers and names, never prompts or outputs."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def headers(self) -> dict[str, str]:
        """The trace context for child spans elsewhere: `traceparent`, and `tracestate` if there is one."""
        tracing, headers = self._tracing, dict[str, str]()
        tracing._contexts.inject(headers, context=tracing._library.set_span_in_context(self._span))
        return headers

    def rename(self, name: str) -> None:
        """Changes the name, if the right one is known only later."""
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None) -> None:
        self._span.add_event(name, attributes)

    def child(self, name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value] | None = None) -> None:
        """Adds a child span that has already ended."""
        child = self._tracing.start(name, self.headers, start_ns=start_ns)
        if child is not None:
            child.set(attributes or {})
            child.end(end_ns)

    def end(self, end_ns: int | None = None, failed: str = "") -> None:
        """Ends the span; a non-empty `failed` marks it as an error, for that reason."""
        if failed:
            trace = self._tracing._library
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, failed))
        self._span.end(end_ns)
