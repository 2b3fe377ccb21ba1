"""Makes the request of a batch's line to the application, in process, with the rights of the batch's owner.

The request reaches the routes as any other request, but passes no middleware.  So it needs no key and does not count as a
request in flight.  `gateway.batches.pace` decides how many lines are carried out at a time.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware

from gateway.access import AccessRules
from gateway.admission.claim import Claim
from gateway.batches.objects import Answer, Line, new_id
from gateway.errors import ApiError, translate
from gateway.keys.caller import Caller, Priority

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""OpenAI's endpoints for batches whose answers are JSON; offered if the application has such a route."""
RETRIED = frozenset({429, 503})
"""Statuses after which a line is tried again: the fleet cannot serve it now."""


class Calls:
    """Calls the routes of one application."""

    def __init__(self, app: FastAPI, doors: AccessRules) -> None:
        self._app = app
        self._inner = AsyncExitStackMiddleware(app.router)
        self._doors = doors
        posts = {getattr(route, "path", "") for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
        self.endpoints = tuple(each for each in ENDPOINTS if each in posts)

    async def answer(self, line: Line, owner: str) -> Answer:
        """Carries out a line."""
        request_id = new_id("")
        try:
            status, body = await self._post(line, owner, request_id)
        except Exception as error:
            known = translate(error)
            if known.status == 500 and not isinstance(error, ApiError):
                raise
            status, body = known.status, json.dumps(known.body()).encode()
        usage = msgspec.json.decode(body, type=_Used).usage if status == 200 else None
        return Answer(line.custom_id, status, msgspec.Raw(body), request_id, usage=usage)

    async def _post(self, line: Line, owner: str, request_id: str) -> tuple[int, bytes]:
        # The present rights of the owner's key; none if it is gone.
        caller = self._doors.ring.of_owner(owner) or Caller("", owner, models=frozenset())
        claim = Claim(caller, Priority.BATCH, wait_s=None, accounts=self._doors.quotas)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            # As `Access` would have made the state.
            await self._inner(scope | {"app": self._app, "state": {"caller": caller, "claim": claim}}, receive, send)

        headers = {"content-type": "application/json", "x-request-id": request_id}
        request = httpx.Request("POST", f"http://batch{line.url}", headers=headers, content=bytes(line.body))
        try:
            answer = await httpx.ASGITransport(app).handle_async_request(request)
            return answer.status_code, await answer.aread()
        finally:
            claim.close()


class _Used(msgspec.Struct):
    usage: Any = None
