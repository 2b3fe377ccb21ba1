"""GET /v1/models, /v1/models/{id}; POST /tokenize and /detokenize, with and without the /v1 prefix."""

from __future__ import annotations

from typing import Any

import pydantic
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from backend.engine.front import DetokenizeRequest, ErrorResponse, TokenizeChatRequest, TokenizeCompletionRequest
from gateway.errors import ModelNotFound, from_vllm
from gateway.requests import parse, read_json
from gateway.state import gateway_of

router = APIRouter()


async def _cards(request: Request) -> list[dict[str, Any]]:
    listed = await gateway_of(request).services.models.show_available_models()
    return [card.model_dump(mode="json") for card in listed.data]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The base model and its adapters."""
    return JSONResponse({"object": "list", "data": await _cards(request)})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """One of them."""
    for card in await _cards(request):
        if card["id"] == model_id:
            return JSONResponse(card)
    raise ModelNotFound("The model does not exist.", param="model")


@router.post("/tokenize")
@router.post("/v1/tokenize")
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages through the chat template."""
    gateway = gateway_of(request)
    data = await read_json(request, gateway.max_body_bytes)
    kind: type[pydantic.BaseModel] = TokenizeChatRequest if "messages" in data else TokenizeCompletionRequest
    return _answer(await gateway.services.tokenization.create_tokenize(parse(kind, data), request))


@router.post("/detokenize")
@router.post("/v1/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    gateway = gateway_of(request)
    asked = parse(DetokenizeRequest, await read_json(request, gateway.max_body_bytes))
    return _answer(await gateway.services.tokenization.create_detokenize(asked, request))


def _answer(result: Any) -> Response:
    if isinstance(result, ErrorResponse):
        raise from_vllm(result.error.model_dump())
    return JSONResponse(result.model_dump(mode="json"))
