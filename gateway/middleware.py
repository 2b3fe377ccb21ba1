"""What happens to every request before and after its route: id, key, admission, counting, errors.  Plain ASGI, no copies.

Outermost first: `Envelope` gives the request its id, counts it and turns any exception into an error response; `Admission`
checks the key and the number of requests in flight.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import ApiError, Forbidden, TooManyRequests, Unauthorized, translate
from gateway.guard import host_of, is_loopback, whole_body
from gateway.metrics import GatewayMetrics
from gateway.page import FILES
from gateway.sse import ClientGone

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/openapi.json", *FILES})
"""Reached without a key: probes and scrapers have none, and pages and the API's document say nothing of the fleet."""

ADMIN_PATH = "/admin"
"""Here and below the fleet is changed."""
ADMIN_PATHS = frozenset({ADMIN_PATH, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Also for administrators only."""

LIMITED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/rerank"}
)
"""The paths whose requests count against `max_in_flight`."""

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def send_error(error: ApiError, path: str, send: Send) -> None:
    """An error as a whole response."""
    body = json.dumps(error.body_for(path)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Envelope:
    """Request id in and out, one count per request, and the last resort for exceptions."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _take_request_id(scope)
        status = 0

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        started = time.monotonic()
        try:
            await self._app(scope, receive, named_send)
        except (ClientGone, ClientDisconnect):
            status = status or 499
            self._metrics.client_left()
        except Exception as error:
            known = translate(error)
            if known.status == 500:
                logger.exception("request %s failed", request_id)
            if status:
                raise
            await send_error(known, scope["path"], named_send)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.request_done(route, status or 499)
            logger.debug("%s %s %d %.3f s", request_id, route, status or 499, time.monotonic() - started)


class Admission:
    """The API key, then the limit on requests in flight."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, api_key: str | None, admin_key: str | None, max_in_flight: int
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._api_key = api_key.encode() if api_key else None
        self._admin_key = admin_key.encode() if admin_key else None
        self._max_in_flight = max_in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path in ADMIN_PATHS or path.startswith(f"{ADMIN_PATH}/"):
            self._check_administrator(scope)
        elif path not in OPEN_PATHS and not _shows(self._api_key, scope):
            raise Unauthorized("Missing or wrong API key. Send it as `Authorization: Bearer <key>`.")
        if path not in LIMITED_PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        receive = await whole_body(scope, receive)
        if self._metrics.in_flight >= self._max_in_flight:
            raise TooManyRequests(f"More than {self._max_in_flight} requests are in flight. Try again.")
        with self._metrics.one_in_flight():
            await self._app(scope, receive, send)

    def _check_administrator(self, scope: Scope) -> None:
        """The admin key where there is one; else this very machine, and the API key where there is one of those.

        Without a key a web page could have its visitor's browser call us under a name of its own that leads to 127.0.0.1: so
        the name we are called by counts too.
        """
        if self._admin_key is not None:
            if not _shows(self._admin_key, scope):
                raise Unauthorized("Missing or wrong admin key. Send it as `Authorization: Bearer <key>`.")
            return
        client = scope.get("client")
        if client is None or not (is_loopback(client[0]) and is_loopback(host_of(Headers(scope=scope).get("host", "")))):
            raise Forbidden("Without `gateway.admin_key` the fleet is administered from the gateway's own machine only.")
        if not _shows(self._api_key, scope):
            raise Unauthorized("Missing or wrong API key. Send it as `Authorization: Bearer <key>`.")


def _shows(key: bytes | None, scope: Scope) -> bool:
    """Whether the request carries `key`, or needs none."""
    if key is None:
        return True
    scheme, _, shown = Headers(scope=scope).get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), key)


def _take_request_id(scope: Scope) -> str:
    """The client's request id if it is a fit one, else a new one, which the routes then find in the headers too."""
    given = Headers(scope=scope).get("x-request-id", "")
    if _REQUEST_ID.fullmatch(given):
        return given
    new = uuid.uuid4().hex
    scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    scope["headers"].append((b"x-request-id", new.encode()))
    return new
