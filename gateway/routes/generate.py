"""POST /v1/chat/completions and /v1/completions.  Reads and checks the request; vLLM's serving classes make the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.engine.front import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    VLLMValidationError,
)
from backend.engine.front.client import offer_plain
from backend.engine.front.deferred import Deferred
from backend.engine.front.plain import PlainStream
from gateway.admission.admit import admit
from gateway.auth.rights import Right
from gateway.fleet.statistics import SpeculationOptions
from gateway.http import json_answers
from gateway.http.errors import BadRequest, ContextTooLong, checked
from gateway.http.openapi import described
from gateway.http.sse import CHAT, Dialect, Generated, stream_response, unless_disconnected
from gateway.requests.body import ModelT, check_generation, fitted, parse, read_json
from gateway.requests.fields import GENERATING
from gateway.requests.limits import check_bounds, check_sequences
from gateway.requests.options import inquire, with_usage
from gateway.requests.tools import ended_apart, only_allowed
from gateway.state import Gateway, gateway_of

router = APIRouter()
Create = Callable[[Any, Request], Awaitable[Any]]


@router.post(
    "/v1/chat/completions", **described(ChatCompletionRequest, ChatCompletionResponse, streams=True, right=Right.GENERATE)
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    gateway = gateway_of(request)
    asked, inquiry = await _read(gateway, request, ChatCompletionRequest)

    async def create(asked: Any, request: Request) -> Any:
        made = await gateway.services.chat.create_chat_completion(asked, request)
        return ended_apart(made) if asked.tools and isinstance(made, AsyncGenerator) else made

    return await respond(gateway, request, asked, create, CHAT, inquiry=inquiry)


@router.post(
    "/v1/chat/completions/batch", **described(BatchChatCompletionRequest, ChatCompletionResponse, right=Right.GENERATE)
)
async def chat_completions_of_many(request: Request) -> Response:
    """vLLM's route for many chats: `messages` is a list of conversations, and each gets one choice."""
    gateway = gateway_of(request)
    data = await read_json(request, gateway.max_body_bytes)
    check_sequences(data, gateway.settings.gateway.max_sequences)
    asked = parse(BatchChatCompletionRequest, data)
    return await respond(gateway, request, asked, gateway.services.chat_of_many.create_batch_chat_completion, CHAT)


@router.post("/v1/completions", **described(CompletionRequest, CompletionResponse, streams=True, right=Right.GENERATE))
async def completions(request: Request) -> Response:
    """OpenAI's (legacy) completions."""
    gateway = gateway_of(request)
    asked, inquiry = await _read(gateway, request, CompletionRequest)
    return await respond(gateway, request, asked, gateway.services.completion.create_completion, CHAT, inquiry=inquiry)


async def _read(gateway: Gateway, request: Request, model: type[ModelT]) -> tuple[ModelT, SpeculationOptions | None]:
    """The body as `model`, and its options for speculation."""
    data = await read_json(request, gateway.max_body_bytes)
    check_bounds(data)
    check_sequences(data, gateway.settings.gateway.max_sequences)
    inquiry = await inquire(gateway, request, data)
    asked = fitted(model, only_allowed(with_usage(data, inquiry)), GENERATING)
    if inquiry is not None:
        inquiry.choices = getattr(asked, "n", None) or 1
    return asked, inquiry


async def respond(
    gateway: Gateway,
    request: Request,
    asked: Any,
    create: Create,
    dialect: Dialect,
    shown: Callable[[Any], dict[str, Any]] = json_answers.body,
    inquiry: SpeculationOptions | None = None,
) -> Response:
    """The response to `asked`: a stream, or the JSON that `shown` makes of vLLM's answer; with the statistics of `inquiry`."""
    if dialect is CHAT and inquiry is None:
        offer_plain()
    answer = await generate(gateway, request, asked, create, inquiry)
    if isinstance(answer, AsyncGenerator):
        answer = Generated(answer if inquiry is None else inquiry.add_to_stream(answer))
    if isinstance(answer, Generated | PlainStream):
        return await stream_response(request, answer, dialect, gateway.metrics.client_left)
    whole = await json_answers.whole(answer, shown) if isinstance(answer, Deferred) else None
    body = shown(answer) if whole is None else whole.body
    if inquiry is not None:
        body = await inquiry.add_to(body)
    return Response(msgspec.json.encode(body), media_type="application/json") if whole is None else whole.response(body)


async def generate(
    gateway: Gateway, request: Request, asked: Any, create: Create, inquiry: SpeculationOptions | None = None
) -> Any:
    """Has vLLM answer; returns its answer or stream.  Cancelled when the client leaves.  Raises `ApiError`."""
    check_generation(asked, vllm_speculates=gateway.settings.mode == "native")
    if gateway.services.pooling.is_model:
        raise BadRequest("This model embeds or scores text; it does not write any.", param="model")
    claim = admit(gateway, request, asked)
    claim.inquiry = inquiry
    await gateway.client.core.until_routable()
    try:
        answer = await unless_disconnected(request, create(asked, request))
    except VLLMValidationError as error:
        if error.parameter == "max_tokens" and error.value == 0 and not _asked_for_nothing(asked):
            # vLLM computed 0 as the rest of the context behind the prompt, and reports it as if the client had sent it.
            context = gateway.client.model_config.max_model_len
            raise ContextTooLong.of(context, "the prompt fills it, and no token could be generated") from None
        if error.parameter == "logprobs" and getattr(asked, "top_logprobs", None):
            # `logprobs` is vLLM's internal name for the client's field `top_logprobs`.
            raise BadRequest(str(error.args[0]), param="top_logprobs") from None
        raise
    return checked(answer)


def _asked_for_nothing(asked: Any) -> bool:
    return any(getattr(asked, name, None) == 0 for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
