"""Work on every request around its route: id, origin, counting, headers, log, errors.  Plain ASGI; bodies are not copied."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission.claim import Claim
from gateway.auth.caller import ANYBODY
from gateway.http.errors import BadRequest, translate
from gateway.http.guard import PROBES, check_source
from gateway.http.spans import begin_span, end_span

if TYPE_CHECKING:
    from gateway.state import Gateway

logger = logging.getLogger(__name__)
access = logging.getLogger("outrider.access")
"""Logs one line per request: at level `info`, for probes and scrapers at `debug`."""

QUIET_PATHS = PROBES | {"/metrics"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Envelope:
    """Gives each request its id, counts it, adds headers with the rest of the key's quotas, and answers uncaught exceptions.

    With tracing, each request has a span.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway, state = self._gateway, scope.setdefault("state", {})
        _take_request_id(scope)
        span = None if gateway.tracing is None else begin_span(gateway.tracing, scope)

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                state["status"] = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
                message["headers"] += _times(started, state.get("claim"))
                message["headers"] += gateway.quotas.headers(state.get("caller", ANYBODY))
            await send(message)

        started = time.monotonic()
        try:
            check_source(scope, gateway.settings.gateway, has_key=not gateway.ring.open)
            await self._app(scope, receive, named_send)
        except ClientDisconnect:
            gateway.metrics.disconnects.inc()
        except Exception as error:
            known = translate(error)
            if known.status == 500:
                logger.exception("request %s failed", state["request_id"])
            if "status" in state:
                raise
            response = JSONResponse(known.body_for(scope["path"]), known.status, known.headers())
            await response(scope, receive, named_send)
        finally:
            route, status = getattr(scope.get("route"), "path", "unmatched"), state.get("status", 499)
            gateway.metrics.requests.labels(route, str(status)).inc()
            if span is not None:
                end_span(span, scope, status)
            level = logging.DEBUG if route in QUIET_PATHS else logging.INFO
            if access.isEnabledFor(level):
                entry = _entry(scope, route, status, started)
                access.log(level, "%s", _text(entry), extra={"fields": entry})


def _times(started: float, claim: Claim | None) -> list[tuple[bytes, bytes]]:
    """Headers with the milliseconds until the response began (named as in OpenAI's API), and the gateway's share of them."""
    now = time.monotonic()
    own = now - started
    if claim is not None:
        own -= claim.queued_s
        if claim.placed_at is not None:
            own -= max(0.0, (claim.heard_at or now) - claim.placed_at)
    return [
        (b"openai-processing-ms", b"%d" % round((now - started) * 1000)),
        (b"x-outrider-gateway-ms", b"%.2f" % (max(0.0, own) * 1000)),
    ]


def _entry(scope: Scope, route: str, status: int, started: float) -> dict[str, Any]:
    """The fields of a request's log line."""
    entry: dict[str, Any] = {
        "method": scope["method"],
        "route": route,
        "status": status,
        "ms": round((time.monotonic() - started) * 1000, 2),
        "key": scope["state"].get("caller", ANYBODY).name or None,
        "request_id": scope["state"]["request_id"],
    }
    claim: Claim | None = scope["state"].get("claim")
    if claim is not None:
        entry |= {
            "prompt_tokens": round(claim.prompt_tokens),
            "output_tokens": claim.output_tokens,
            "queued_ms": round(claim.queued_s * 1000, 2),
            "verifier": claim.verifier,
        }
    return entry


def _text(entry: dict[str, Any]) -> str:
    head = f"{entry['method']} {entry['route']} {entry['status']} {entry['ms']} ms"
    rest = [f"{name}={value}" for name, value in list(entry.items())[4:] if value is not None]
    return " ".join([head, *rest])


def _take_request_id(scope: Scope) -> None:
    """The client's request id if it is well-formed, else a new one, which is put into the headers for the routes."""
    given = Headers(scope=scope).get("x-request-id", "")
    scope["state"]["unnamed"] = not _REQUEST_ID.fullmatch(given)
    scope["state"]["request_id"] = given
    if scope["state"]["unnamed"]:
        _set_request_id(scope, uuid.uuid4().hex)


def take_name(request: Request, name: Any) -> None:
    """The body's `request_id`: the request's id, unless a header has named one.  Raises `BadRequest`."""
    if not isinstance(name, str) or not _REQUEST_ID.fullmatch(name):
        raise BadRequest("`request_id` must be 1 to 128 printable ASCII characters without blanks.", param="request_id")
    if request.scope["state"].get("unnamed"):
        _set_request_id(request.scope, name)
        # vLLM asks the request, which keeps headers that it has read.
        request._headers = Headers(scope=request.scope)


def _set_request_id(scope: Scope, name: str) -> None:
    others = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    scope["headers"] = [*others, (b"x-request-id", name.encode())]
    scope["state"]["request_id"] = name
