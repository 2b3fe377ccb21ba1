"""Routes for models and their LoRA adapters; /tokenize and /detokenize, with and without the prefix /v1."""

from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from backend.engine import front as vllm
from gateway.admission.admit import check_model
from gateway.auth.caller import caller_of
from gateway.auth.rights import Right
from gateway.http.errors import BadRequest, EngineFailed, Forbidden, ModelNotFound, checked
from gateway.http.openapi import LIST, described, shape
from gateway.http.sse import unless_disconnected
from gateway.requests.body import ModelT, parse, read_json
from gateway.routes.lists import page_of
from gateway.state import Gateway, gateway_of

router = APIRouter()


@router.get("/v1/models", **described(gives=LIST, right=Right.KEY))
async def list_models(request: Request) -> Response:
    """The base model and its adapters, with the fields of OpenAI's and of Anthropic's API."""
    cards = _cards(request)
    return JSONResponse(page_of(cards, len(cards), "asc", None))


@router.get("/v1/models/{model_id:path}", **described(gives=shape("id", "object", "created", "owned_by"), right=Right.KEY))
async def get_model(request: Request, model_id: str) -> Response:
    """One model or adapter."""
    for card in _cards(request):
        if card["id"] == model_id:
            return JSONResponse(card)
    raise ModelNotFound("The model does not exist, or this key has no access to it.", param="model")


def _cards(request: Request) -> list[dict[str, Any]]:
    gateway = gateway_of(request)
    models = gateway.services.models
    base = models.model_name()
    may_use = caller_of(request).may_use
    names = [each.name for each in models.base_model_paths]
    cards = [_card(gateway, name, base) for name in names]
    cards += [_card(gateway, name, base, parent=base) for name in models.lora_requests]
    return [card for card in cards if may_use(card["id"])]


def _card(gateway: Gateway, name: str, root: str, *, parent: str | None = None) -> dict[str, Any]:
    """One model's entry.  `root` is the base model's name, not its directory, which clients must not learn."""
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.started),
        "owned_by": "outrider",
        "root": root,
        "parent": parent,
        "max_model_len": gateway.client.model_config.max_model_len,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(int(gateway.started), UTC).isoformat().replace("+00:00", "Z"),
    }


@router.post("/v1/load_lora_adapter", **described(vllm.LoadLoRAAdapterRequest, shape("message"), right=Right.ADMINISTER))
@router.post("/load_lora_adapter", **described(vllm.LoadLoRAAdapterRequest, shape("message"), right=Right.ADMINISTER))
async def load_adapter(request: Request) -> Response:
    """Loads a LoRA adapter under a name, from a directory that the verifiers can read.  For administrators.

    The route without `/v1` replaces an adapter of that name, as prime-rl expects.
    """
    body, gateway = await _adapter(request, vllm.LoadLoRAAdapterRequest), gateway_of(request)
    known = gateway.services.models.lora_requests.get(body.lora_name)
    # An adapter that was unloaded may still be in verifiers, under the number that its name and directory give it.
    body.load_inplace |= known is None or not request.scope["route"].path.startswith("/v1")
    answer = _checked_answer(await gateway.services.models.load_lora_adapter(body))
    if known is not None and known.lora_path == body.lora_path:
        # Verifiers have discarded what the earlier one computed.
        gateway.client.core.choosing.emptied(gateway.client.core.links)
    loaded = msgspec.to_builtins([gateway.services.models.lora_requests[body.lora_name]])
    await gateway.peers.tell(f"did not load {body.lora_name}", "take_adapters", loaded)
    return answer


@router.post("/v1/unload_lora_adapter", **described(vllm.UnloadLoRAAdapterRequest, shape("message"), right=Right.ADMINISTER))
@router.post("/unload_lora_adapter", **described(vllm.UnloadLoRAAdapterRequest, shape("message"), right=Right.ADMINISTER))
async def unload_adapter(request: Request) -> Response:
    """Unloads a LoRA adapter.  For administrators."""
    body, gateway = await _adapter(request, vllm.UnloadLoRAAdapterRequest), gateway_of(request)
    answer = _checked_answer(await gateway.services.models.unload_lora_adapter(body))
    await gateway.peers.tell(f"did not unload {body.lora_name}", "unload", body.model_dump())
    return answer


async def _adapter(request: Request, model: type[ModelT]) -> ModelT:
    gateway = gateway_of(request)
    if "verifier" in request.query_params:
        # Any verifier loads one that it lacks with the first request for it.
        raise BadRequest("Adapters are those of all verifiers: leave out `verifier`.", param="verifier")
    if not gateway.settings.verifier.adapters_loadable:
        raise Forbidden("Adapters are loaded over HTTP only with `verifier.adapters_loadable`.")
    return parse(model, await read_json(request))


def _checked_answer(result: Any) -> Response:
    if isinstance(result, vllm.ErrorResponse) and result.error.code == 500:
        # The client is an administrator, and requires vLLM's reason to find out what is wrong with the adapter.
        raise EngineFailed(result.error.message)
    return JSONResponse({"message": checked(result)})


_TOKENIZE = described((vllm.TokenizeCompletionRequest, vllm.TokenizeChatRequest), vllm.TokenizeResponse, right=Right.KEY)


@router.post("/tokenize", **_TOKENIZE)
@router.post("/v1/tokenize", **_TOKENIZE)
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages through the chat template."""
    gateway = gateway_of(request)
    data = await read_json(request)
    kind: type[pydantic.BaseModel] = vllm.TokenizeChatRequest if "messages" in data else vllm.TokenizeCompletionRequest
    body = parse(kind, data)
    check_model(gateway, request, body)
    async with gateway.tokenizing:
        return _answer(await unless_disconnected(request, gateway.services.tokenization.create_tokenize(body, request)))


@router.post("/detokenize", **described(vllm.DetokenizeRequest, vllm.DetokenizeResponse, right=Right.KEY))
@router.post("/v1/detokenize", **described(vllm.DetokenizeRequest, vllm.DetokenizeResponse, right=Right.KEY))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    gateway = gateway_of(request)
    body = parse(vllm.DetokenizeRequest, await read_json(request))
    check_model(gateway, request, body)
    return _answer(await gateway.services.tokenization.create_detokenize(body, request))


@router.get("/tokenizer_info", **described(gives=vllm.TokenizerInfoResponse, right=Right.KEY))
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration and the chat template, without the paths that they were read from."""
    info = await gateway_of(request).services.tokenization.get_tokenizer_info()
    shown = info.model_dump(mode="json", by_alias=True)
    return JSONResponse({name: each for name, each in shown.items() if name != "name_or_path" and not name.endswith("_file")})


def _answer(result: Any) -> Response:
    # These are vLLM's own routes, so null fields are kept.
    return JSONResponse(checked(result).model_dump(mode="json"))
