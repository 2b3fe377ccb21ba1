"""Access control: keys, rights, quotas, and the limit on requests in flight.  Plain ASGI, between the router and its routes.

The route that was found decides who may call it, so no spelling of a path can evade that.
`Access` puts the caller into `scope["state"]["caller"]` (`gateway.auth.caller`), and a new `Claim` into
`scope["state"]["claim"]` (`gateway.admission.claim`).  The routes fill in the claim.
"""

import json
import logging
from contextlib import closing
from functools import partial
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.claim import Claim
from gateway.auth.caller import ANYBODY, Caller
from gateway.auth.rights import Right, right_of
from gateway.http.errors import Forbidden, TooManyRequests, Unauthorized
from gateway.http.guard import MAX_ARRIVING_BYTES, MAX_BODY_BYTES, host_of, is_local_origin, is_loopback, read_body
from gateway.requests.body import TENSORS, media_type
from gateway.state import Gateway

audit = logging.getLogger("outrider.audit")

FORWARDED = frozenset({"forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"})
"""Headers by which proxies say that a request is another's."""
AUDITED_BYTES = 2048
"""Most bytes of an administrator's command in the log."""


class Access:
    """Checks the key, then the limit on requests in flight, then the key's quotas."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._others = self._other_bytes = 0
        """Requests by POST in progress that do not generate, and the bytes of their bodies."""

    def guard(self, app: FastAPI) -> None:
        """Stands before every route of `app`, and before its answer to unknown URLs.

        Raises `TypeError` for a route that does not say who may call it.
        """
        for route in app.routes:
            right = right_of(route)
            assert isinstance(route, APIRoute)
            route.app = partial(self._enter, route.app, right, bool((route.openapi_extra or {}).get("form")))
        app.router.default = partial(self._enter, app.router.default, Right.KEY, False)

    async def _enter(self, app: ASGIApp, right: Right, to_disk: bool, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request pass to `app` if its caller has the right.  `to_disk`: the body is not kept in memory."""
        state = scope["state"]
        if "caller" in state:
            # A batch's line comes with its owner and its claim; see `gateway.storage.batches.calls`.
            await app(scope, receive, send)
            return
        if right is Right.ADMINISTER:
            await self._administer(app, scope, receive, send)
            return
        caller = state["caller"] = self._caller(scope, right)
        # Work comes by POST; other methods only read and are not limited.
        if scope["method"] != "POST":
            await app(scope, receive, send)
            return
        gateway, quotas = self._gateway, self._gateway.quotas
        if not to_disk:
            await read_body(Request(scope, receive), MAX_BODY_BYTES)
        most = gateway.settings.gateway.max_in_flight
        if (gateway.metrics.in_flight if right is Right.GENERATE else self._others) >= most:
            raise TooManyRequests(f"More than {most} requests are in flight. Try again.")
        if right is not Right.GENERATE:
            await self._serve_other(app, scope, receive, send, caller)
            return
        gateway.metrics.in_flight += 1
        try:
            with quotas.counted(caller), closing(Claim(caller, caller.priority, accounts=quotas)) as state["claim"]:
                await app(scope, receive, send)
        finally:
            gateway.metrics.in_flight -= 1

    async def _serve_other(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, caller: Caller) -> None:
        """Serves a request that does not generate; it may wait, for a thread for example, with its body in memory."""
        size = len(scope["state"].get("body", b""))
        if self._others and self._other_bytes + size > MAX_ARRIVING_BYTES:
            raise TooManyRequests("Too many large requests are in progress. Try again.")
        self._others += 1
        self._other_bytes += size
        try:
            with self._gateway.quotas.counted(caller):
                await app(scope, receive, send)
        finally:
            self._others -= 1
            self._other_bytes -= size

    def _caller(self, scope: Scope, right: Right) -> Caller:
        ring = self._gateway.ring
        if right is Right.NOTHING or (right is Right.METRICS and not ring.guards_metrics):
            return ANYBODY
        caller = ring.find(scope)
        if right is Right.METRICS:
            caller = ring.find_administrator(scope) or caller
        if caller is None:
            raise Unauthorized("Missing or wrong API key. Send it as `Authorization: Bearer <key>`.")
        if right is Right.METRICS and not (caller.metrics or caller.admin):
            raise Forbidden("This key does not open the metrics.")
        return caller

    async def _administer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets only administrators' requests pass.  Logs the caller, the command and its status."""
        known = self._gateway.ring.find(scope) or self._gateway.ring.find_administrator(scope)
        who, status = "nobody" if known is None else known.name or "anybody", 0
        # One tensor of a large model is larger than any other body.
        tensors = media_type(Request(scope)) == TENSORS
        try:
            caller = scope["state"]["caller"] = self._administrator(scope)
            who = caller.name or "this machine"
            if scope["method"] == "POST":
                await read_body(Request(scope, receive), MAX_ARRIVING_BYTES if tensors else MAX_BODY_BYTES)
            await app(scope, receive, send)
            status = scope["state"].get("status", 0)
        except Exception as error:
            status = getattr(error, "status", 500)
            raise
        finally:
            if scope["method"] not in ("GET", "HEAD"):
                query = scope["query_string"].decode("latin-1")
                what = f"{scope['method']} {quote(scope['path'])}{'?' if query else ''}{query}"
                body = scope["state"].get("body", b"")
                fields = json.dumps(f"{len(body)} bytes") if tensors else _fields(body)
                entry = {"by": who, "what": what, "fields": fields, "status": status}
                audit.info("%s", " ".join(f"{name}={value}" for name, value in entry.items()), extra={"fields": entry})

    def _administrator(self, scope: Scope) -> Caller:
        """The caller, if it may administer the fleet.  Raises `Unauthorized` or `Forbidden`.

        If any key has that right, such a key is required.  Otherwise the request must come from this machine, with the API key
        if there is one, through no proxy that says so, and with a loopback name as `Host`: a web page could send its
        visitor's browser here under another.  Pages that may call (`cors_origins`) may not administer.
        """
        ring = self._gateway.ring
        if ring.has_admin:
            caller = ring.find_administrator(scope)
            if caller is not None:
                return caller
            known = ring.find(scope)
            if known is not None and known.owner:
                raise Forbidden("This key may not administer the fleet.")
            raise Unauthorized("Missing or wrong admin key. Send it as `Authorization: Bearer <key>`.")
        client, headers = scope.get("client"), Headers(scope=scope)
        is_local = client is not None and is_loopback(client[0]) and is_loopback(host_of(headers.get("host", "")))
        # A proxy on this machine passes on others' requests.  The server reads `X-Forwarded-For`, which may say what it likes.
        is_own = FORWARDED.isdisjoint(headers.keys())
        if not (is_local and is_own and is_local_origin(headers.get("origin"))):
            raise Forbidden("Without a key for it the fleet is administered from the gateway's own machine only.")
        caller = ring.find(scope)
        if caller is None:
            raise Unauthorized("Missing or wrong API key. Send it as `Authorization: Bearer <key>`.")
        return caller


def _fields(body: bytearray) -> str:
    """A command's body on one line, for the log; as a string where it is no JSON, or too long to be read whole."""
    # Without runs of blanks, behind which the rest would not be seen.
    start = b" ".join(body.split(None, AUDITED_BYTES))[:AUDITED_BYTES]
    try:
        return json.dumps(json.loads(start or b"{}"), separators=(",", ":"))
    except (ValueError, RecursionError):
        return json.dumps(start.decode(errors="replace"))
