"""Makes the request of a batch's line to the application, in process, with the rights of the batch's owner.

The request reaches the routes as any other request, but passes no middleware.  `gateway.auth.access` takes the caller that it
has here.  So it needs no key and does not count as a request in flight.  `pace.py` decides how many lines are carried out at a
time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware

from gateway.admission.claim import Claim
from gateway.auth.caller import Caller, Priority
from gateway.http.errors import ApiError, translate
from gateway.storage.batches.lines import BatchLine, LineAnswer, again, new_id

if TYPE_CHECKING:
    from gateway.state import Gateway

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""OpenAI's endpoints for batches whose answers are JSON."""


async def carry_out(line: BatchLine, owner: str, app: FastAPI, gateway: Gateway) -> LineAnswer | None:
    """Carries out a line.  None if it should be tried again later."""
    request_id = new_id("")
    try:
        status, headers, body = await _post(line, owner, request_id, app, gateway)
    except Exception as error:
        known = translate(error)
        if known.status == 500 and not isinstance(error, ApiError):
            raise
        status, headers, body = known.status, known.headers(), json.dumps(known.body()).encode()
    if again(status, headers, body):
        return None
    usage = msgspec.json.decode(body, type=_AnswerUsage).usage if status == 200 else None
    return LineAnswer(line.custom_id, status, msgspec.Raw(body), request_id, usage=usage)


async def _post(
    line: BatchLine, owner: str, request_id: str, app: FastAPI, gateway: Gateway
) -> tuple[int, Mapping[str, str], bytes]:
    # The present rights of the owner's key; none if it is gone.
    caller = gateway.ring.of_owner(owner) or Caller("", owner, models=frozenset())
    claim = Claim(caller, Priority.BATCH, wait_s=None, accounts=gateway.quotas)
    # As `Access` would have made it.
    state = {"caller": caller, "claim": claim, "body": bytes(line.body)}
    routes = AsyncExitStackMiddleware(app.router)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await routes(scope | {"app": app, "state": state}, receive, send)

    headers = {"content-type": "application/json", "x-request-id": request_id}
    request = httpx.Request("POST", f"http://batch{line.url}", headers=headers)
    try:
        answer = await httpx.ASGITransport(inner).handle_async_request(request)
        return answer.status_code, answer.headers, await answer.aread()
    finally:
        claim.close()


class _AnswerUsage(msgspec.Struct):
    """What is read of a line's answer."""

    usage: Any = None
