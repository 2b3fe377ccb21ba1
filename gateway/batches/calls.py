"""A request of a batch's line, made to the application from within: behind the door, with the rights of the batch's owner.

It meets the routes as any other does.  Keys and the limit on requests in flight are the door's affair, and this has none: what
may be carried out at a time is decided by `gateway.batches.pace`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware

from gateway.access import Doors
from gateway.admission.claim import Claim
from gateway.batches.objects import Answer, Line, new_id
from gateway.errors import ApiError, translate
from gateway.keys.caller import Caller, Priority

Rights = Callable[[str], dict[str, Any]]
"""What the door would have put into a request's state, by the batch's owner."""

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""OpenAI's for batches, as far as their answers are JSON; offered where the application has such a route."""
RETRIED = frozenset({429, 503})
"""The fleet cannot serve it now: this says nothing of the line."""


def rights_of(owner: str, doors: Doors) -> dict[str, Any]:
    """What the owner's key allows now, nothing if it is gone; a line waits for room as long as it takes, behind all others."""
    caller = doors.ring.of_owner(owner) or Caller("", owner, models=frozenset())
    return {"caller": caller, "claim": Claim(caller, Priority.BATCH, wait_s=None, accounts=doors.quotas)}


class Calls:
    """Calls of one application's routes."""

    def __init__(self, app: FastAPI, rights: Rights) -> None:
        self._app = app
        self._inner = AsyncExitStackMiddleware(app.router)
        self._rights = rights
        posts = {getattr(route, "path", "") for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
        self.endpoints = tuple(each for each in ENDPOINTS if each in posts)

    async def answer(self, line: Line, owner: str) -> Answer:
        """What a client would have been told."""
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
        state = self._rights(owner)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._inner(scope | {"app": self._app, "state": state}, receive, send)

        headers = {"content-type": "application/json", "x-request-id": request_id}
        request = httpx.Request("POST", f"http://batch{line.url}", headers=headers, content=bytes(line.body))
        try:
            answer = await httpx.ASGITransport(app).handle_async_request(request)
            return answer.status_code, await answer.aread()
        finally:
            state["claim"].close()


class _Used(msgspec.Struct):
    usage: Any = None
