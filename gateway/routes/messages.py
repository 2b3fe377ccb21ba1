"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, for all served models.  Errors have Anthropic's format."""

from typing import Any

import pydantic
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from backend.engine.front import AnthropicCountTokensRequest, AnthropicMessagesRequest, AnthropicMessagesResponse
from gateway.admission.admit import check_model
from gateway.auth.rights import Right
from gateway.http.errors import checked
from gateway.http.openapi import described, shape
from gateway.http.sse import MESSAGES, unless_disconnected
from gateway.requests.anthropic import readable
from gateway.requests.body import parse, read_json
from gateway.requests.fields import MESSAGES_NO_EFFECT, MESSAGING
from gateway.requests.limits import check_text
from gateway.requests.options import read_options
from gateway.routes.generate import respond
from gateway.state import Gateway, gateway_of

router = APIRouter()


@router.post(
    "/v1/messages", **described(AnthropicMessagesRequest, AnthropicMessagesResponse, streams=True, right=Right.GENERATE)
)
async def messages(request: Request) -> Response:
    """Anthropic's messages."""
    gateway = gateway_of(request)
    data = await _read(gateway, request)
    body = parse(AnthropicMessagesRequest, data, MESSAGING)
    # Clients ask for as much as Anthropic's models can write.
    body.max_tokens = min(body.max_tokens, gateway.client.model_config.max_model_len)
    speculation = await read_options(gateway, request, data)
    return await respond(gateway, request, body, gateway.services.messages.create_messages, MESSAGES, _shown, speculation)


@router.post("/v1/messages/count_tokens", **described(AnthropicCountTokensRequest, shape("input_tokens"), right=Right.KEY))
async def count_tokens(request: Request) -> Response:
    """Counts the tokens of messages."""
    gateway = gateway_of(request)
    body = parse(AnthropicCountTokensRequest, await _read(gateway, request), MESSAGES_NO_EFFECT)
    check_model(gateway, request, body)
    async with gateway.tokenizing:
        counted = checked(await unless_disconnected(request, gateway.services.messages.count_tokens(body, request)))
    return JSONResponse({"input_tokens": counted.input_tokens})


async def _read(gateway: Gateway, request: Request) -> dict[str, Any]:
    """The body as `readable` makes it."""
    data = readable(await read_json(request))
    # A document's text, which was media until now, counts too.
    check_text(data, gateway.client.model_config.max_model_len)
    return data


def _shown(answer: pydantic.BaseModel) -> dict[str, Any]:
    return {"stop_sequence": None} | answer.model_dump(mode="json", exclude_none=True)
