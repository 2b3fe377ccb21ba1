"""POST /v1/chat/completions and /v1/completions.  Reads and checks the request; vLLM's serving classes make the answer."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

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
from backend.engine.front.client import submissions
from backend.engine.front.deferred import Deferred
from backend.engine.front.stream import PlainStream
from gateway.admission.admit import admit
from gateway.auth.rights import Right
from gateway.fleet.statistics import SpeculationOptions
from gateway.http import json_answers
from gateway.http.errors import BadRequest, ContextTooLong, checked
from gateway.http.openapi import described
from gateway.http.sse import CHAT, Change, Dialect, Generated, stream_response, unless_disconnected
from gateway.requests.body import ModelT, check_generation, parse, read_json
from gateway.requests.fields import GENERATING
from gateway.requests.options import read_options, with_usage
from gateway.requests.tools import only_allowed, split_off_finish
from gateway.routes.lists import as_json
from gateway.state import Gateway, gateway_of

router = APIRouter()
Create = Callable[[Any, Request], Awaitable[Any]]
Finish = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@router.post(
    "/v1/chat/completions", **described(ChatCompletionRequest, ChatCompletionResponse, streams=True, right=Right.GENERATE)
)
async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions."""
    gateway = gateway_of(request)
    body, speculation = await _read(gateway, request, ChatCompletionRequest)
    create, changes = gateway.services.chat.create_chat_completion, [split_off_finish] if body.tools else []
    return await respond(gateway, request, body, create, CHAT, speculation=speculation, changes=changes)


@router.post(
    "/v1/chat/completions/batch", **described(BatchChatCompletionRequest, ChatCompletionResponse, right=Right.GENERATE)
)
async def chat_completions_of_many(request: Request) -> Response:
    """vLLM's route for many chats: `messages` is a list of conversations, and each gets one choice."""
    gateway = gateway_of(request)
    data = await read_json(request)
    body = parse(BatchChatCompletionRequest, data)
    return await respond(gateway, request, body, gateway.services.chat_of_many.create_batch_chat_completion, CHAT)


@router.post("/v1/completions", **described(CompletionRequest, CompletionResponse, streams=True, right=Right.GENERATE))
async def completions(request: Request) -> Response:
    """OpenAI's (legacy) completions."""
    gateway = gateway_of(request)
    body, speculation = await _read(gateway, request, CompletionRequest)
    return await respond(gateway, request, body, gateway.services.completion.create_completion, CHAT, speculation=speculation)


async def _read(gateway: Gateway, request: Request, model: type[ModelT]) -> tuple[ModelT, SpeculationOptions | None]:
    """The body as `model`, and its options for speculation."""
    data = await read_json(request)
    speculation = await read_options(gateway, request, data)
    return parse(model, only_allowed(with_usage(data, speculation)), GENERATING), speculation


async def respond(
    gateway: Gateway,
    request: Request,
    body: Any,
    create: Create,
    dialect: Dialect,
    shown: Callable[[Any], dict[str, Any]] = json_answers.body,
    speculation: SpeculationOptions | None = None,
    changes: Sequence[Change] = (),
) -> Response:
    """The response to `body`, with `speculation`'s statistics: a stream whose events pass through `changes`, or JSON.

    `shown` makes the JSON of vLLM's answer.
    """
    if dialect is CHAT and speculation is None:
        submissions.set([])
    answer = await generate(gateway, request, body, create, speculation)
    if isinstance(answer, AsyncGenerator):
        answer = Generated(answer, changes if speculation is None else [*changes, speculation.add_to_chunk])
    if isinstance(answer, Generated | PlainStream):
        return await stream_response(request, answer, dialect)
    return await whole_response(answer, shown, None if speculation is None else speculation.add_to)


async def whole_response(answer: Any, shown: Callable[[Any], dict[str, Any]], finish: Finish | None = None) -> Response:
    """The response to vLLM's whole answer: the JSON that `shown` makes of it, with what `finish` does to that."""
    whole = await json_answers.whole(answer, shown) if isinstance(answer, Deferred) else None
    body = shown(answer) if whole is None else whole.body
    if finish is not None:
        body = await finish(body)
    return as_json(body) if whole is None else whole.response(body)


async def generate(
    gateway: Gateway, request: Request, body: Any, create: Create, speculation: SpeculationOptions | None = None
) -> Any:
    """Has vLLM answer; returns its answer or stream.  Cancelled when the client leaves.  Raises `ApiError`."""
    check_generation(body, vllm_speculates=gateway.settings.mode == "native")
    if gateway.services.pooling.is_model:
        raise BadRequest("This model embeds or scores text; it does not write any.", param="model")
    claim = admit(gateway, request, body)
    claim.speculation = speculation
    await gateway.client.core.until_routable()
    try:
        answer = await unless_disconnected(request, create(body, request))
    except VLLMValidationError as error:
        if error.parameter == "max_tokens" and error.value == 0 and not _wants_nothing(body):
            # vLLM computed 0 as the rest of the context behind the prompt, and reports it as if the client had sent it.
            context = gateway.client.model_config.max_model_len
            raise ContextTooLong.of(context, "the prompt fills it, and no token could be generated") from None
        if error.parameter == "logprobs" and getattr(body, "top_logprobs", None):
            # `logprobs` is vLLM's internal name for the client's field `top_logprobs`.
            raise BadRequest(str(error.args[0]), param="top_logprobs") from None
        raise
    return checked(answer)


def _wants_nothing(body: Any) -> bool:
    return any(getattr(body, name, None) == 0 for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
