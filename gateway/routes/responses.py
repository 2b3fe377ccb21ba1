"""OpenAI's /v1/responses: create, stream, get, cancel, delete, list input items, count input tokens."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from backend.engine.front import ResponsesRequest
from gateway.admission.admit import check_model
from gateway.auth.rights import Right
from gateway.http.errors import BadRequest, checked, translate
from gateway.http.openapi import DELETED, LIST, RESPONSE, described, shape
from gateway.http.sse import HEADERS, KEEP_ALIVE_S, Generated, event, stream_response, unless_disconnected
from gateway.requests.body import read_json
from gateway.requests.options import read_options
from gateway.routes.generate import generate, whole_response
from gateway.routes.lists import as_json, page_of
from gateway.state import Gateway, gateway_of, owner_of
from gateway.storage.responses.events import DIALECT

router = APIRouter()
logger = logging.getLogger(__name__)


@router.post("/v1/responses", **described(ResponsesRequest, RESPONSE, streams=True, right=Right.GENERATE))
async def create_response(request: Request) -> Response:
    """OpenAI's responses."""
    gateway = gateway_of(request)
    responses = gateway.responses
    data = await read_json(request)
    turn = await responses.turn(data, owner_of(request))
    turn = replace(turn, speculation=await read_options(gateway, request, data))
    made = await generate(gateway, request, turn.request, gateway.services.responses.create_responses, turn.speculation)
    if turn.background:
        model = turn.request.model or gateway.services.models.model_name()
        body = await responses.begin(turn, made, model, int(time.time()), request.scope["state"]["claim"])
        return _follow(gateway, turn.id, -1) if turn.streamed else JSONResponse(body)
    if isinstance(made, AsyncGenerator):
        written = (event(each, each["type"]).decode() async for each in responses.stream(turn, made))
        return await stream_response(request, Generated(written), DIALECT)
    return await whole_response(
        made, lambda answer: turn.shown(answer.model_dump(mode="json", by_alias=True)), partial(responses.keep, turn)
    )


@router.post("/v1/responses/input_tokens", **described(ResponsesRequest, shape("object", "input_tokens"), right=Right.KEY))
async def count_input(request: Request) -> Response:
    """Counts the tokens of an input."""
    gateway = gateway_of(request)
    turn = await gateway.responses.turn(await read_json(request), owner_of(request))
    check_model(gateway, request, turn.request)
    async with gateway.tokenizing:
        rendered = checked(await unless_disconnected(request, gateway.services.renderer.render_responses(turn.request)))
    count = len(rendered.engine_input["prompt_token_ids"])
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}", **described(gives=RESPONSE, streams=True, right=Right.KEY))
async def get_response(
    request: Request, response_id: str, stream: bool = False, starting_after: int = Query(-1, ge=-1, lt=1 << 63)
) -> Response:
    """A stored response; with `stream`, the events of a background response that is or was streamed."""
    gateway = gateway_of(request)
    kept = await gateway.responses.store.get(response_id, owner_of(request))
    if not stream:
        return as_json(kept.body)
    if not kept.body["background"]:
        raise BadRequest("Only a response made in the background can be streamed again.", param="stream")
    return _follow(gateway, response_id, starting_after)


@router.post("/v1/responses/{response_id}/cancel", **described(gives=RESPONSE, right=Right.KEY))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancels a background response."""
    return JSONResponse(await gateway_of(request).responses.cancel(response_id, owner_of(request)))


@router.delete("/v1/responses/{response_id}", **described(gives=DELETED, right=Right.KEY))
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a response."""
    await gateway_of(request).responses.delete(response_id, owner_of(request))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", **described(gives=LIST, right=Right.KEY))
async def input_items(
    request: Request, response_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str | None = None
) -> Response:
    """The input items of a response: all items before it, and its own."""
    store, owner = gateway_of(request).responses.store, owner_of(request)
    kept = await store.get(response_id, owner)
    before = [] if kept.previous is None else await store.history(kept.previous, owner)
    return as_json(page_of([*before, *kept.input], limit, order, after))


def _follow(gateway: Gateway, response_id: str, after: int) -> Response:
    said_all = asyncio.Event()

    async def left(_: Message) -> None:
        # The server reports a connection whose answer is complete as closed, too.
        if not said_all.is_set():
            gateway.metrics.disconnects.inc()

    return EventSourceResponse(
        _named(gateway.responses.follow(response_id, after), said_all),
        headers=HEADERS,
        ping=KEEP_ALIVE_S,
        sep="\n",
        ping_message_factory=lambda: ServerSentEvent('{"type":"keepalive"}', event="keepalive", sep="\n"),
        client_close_handler_callable=left,
    )


async def _named(events: AsyncGenerator[str, None], said_all: asyncio.Event) -> AsyncGenerator[ServerSentEvent | bytes, None]:
    try:
        async for each in events:
            yield ServerSentEvent(each, event=json.loads(each)["type"], sep="\n")
    except Exception as error:
        known = translate(error)
        if known.status == 500:
            logger.error("a stream failed: %s", type(error).__name__)
        yield DIALECT.failed(known)
    said_all.set()
