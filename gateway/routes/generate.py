"""POST /v1/chat/completions and /v1/completions: read, check, let vLLM's serving layer answer, stream or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pydantic
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from backend.engine.front import ChatCompletionRequest, CompletionRequest, ErrorResponse, VLLMValidationError
from gateway.errors import ContextTooLong, NoVerifier, from_vllm
from gateway.requests import check_generation, parse, read_json
from gateway.session import enter_session
from gateway.sse import stream_response, unless_disconnected
from gateway.state import Gateway, gateway_of

router = APIRouter()
Create = Callable[[Any, Request], Awaitable[Any]]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    gateway = gateway_of(request)
    return await _generate(gateway, request, ChatCompletionRequest, gateway.services.chat.create_chat_completion)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """OpenAI's (legacy) completions."""
    gateway = gateway_of(request)
    return await _generate(gateway, request, CompletionRequest, gateway.services.completion.create_completion)


async def _generate(gateway: Gateway, request: Request, model: type[pydantic.BaseModel], create: Create) -> Response:
    asked = parse(model, await read_json(request, gateway.max_body_bytes))
    check_generation(asked, max_n=gateway.settings.gateway.max_n, vllm_speculates=gateway.vllm_speculates)
    if not gateway.client.ready:
        raise NoVerifier
    # Before vLLM starts the tasks that submit the sequences: they inherit it.
    enter_session(request.headers.get("x-session-id") or getattr(asked, "user", None))
    try:
        answer = await unless_disconnected(request, create(asked, request))
    except VLLMValidationError as error:
        if error.parameter == "max_tokens" and error.value == 0 and not _asked_for_nothing(asked):
            # vLLM's arithmetic: what the prompt leaves of the context, handed on as if the client had sent it.
            raise ContextTooLong("The prompt fills the model's whole context; no token could be generated.") from None
        raise
    if isinstance(answer, ErrorResponse):
        raise from_vllm(answer.error.model_dump())
    if isinstance(answer, AsyncGenerator):
        keep_alive_s = gateway.settings.gateway.keep_alive_s
        return await stream_response(request, answer, keep_alive_s, gateway.metrics.client_left)
    return JSONResponse(answer.model_dump(mode="json"))


def _asked_for_nothing(asked: Any) -> bool:
    return 0 in (asked.max_tokens, getattr(asked, "max_completion_tokens", None))
