"""Makes /openapi.json: every route with its request and answer, from the models that the routes use."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import pydantic
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from backend.coordinator.commands import AnyCommand
from backend.engine import front as vllm
from backend.engine.front import pooling
from gateway.asking import Options, Prediction
from gateway.fields import MESSAGES_NO_EFFECT, NO_EFFECT, REFUSED, RESPONSES_NO_EFFECT
from gateway.requests import Body
from gateway.routes import batches, conversations, weights

_REF = "#/components/schemas/{model}"
Schema = dict[str, Any]


def _object(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_STRING: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}
_ERROR = _object(
    "error",
    error=_object(*("message", "type", "param", "code"), message=_STRING, type=_STRING, param=_NULLABLE, code=_NULLABLE),
)
_ANTHROPIC_ERROR = _object(
    "type", "error", type={"const": "error"}, error=_object("type", "message", type=_STRING, message=_STRING)
)
_LIST = _object("object", "data", object={"const": "list"}, data={"type": "array", "items": {"type": "object"}})
_RESPONSE = _object("id", "object", "status", "output", "created_at", object={"const": "response"})
_DELETED = _object("id", "object", "deleted", id=_STRING, deleted={"const": True})
_CONVERSATION = _object("id", "object", "created_at", "metadata", object={"const": "conversation"})
_ITEM = _object("id", id=_STRING)
_FILE = _object("id", "object", "bytes", "created_at", "filename", "purpose", "status", object={"const": "file"})
_UPLOAD = _object("file", "purpose", file={"type": "string", "format": "binary"}, purpose={"const": "batch"})
_BATCH = _object("id", "object", "endpoint", "input_file_id", "status", "created_at", object={"const": "batch"})


@dataclass(frozen=True)
class Operation:
    """`takes`: the body's model or schema; `gives`: that of the answer; `streams`: the answer may be server-sent events."""

    takes: type[pydantic.BaseModel] | tuple[type[Any], ...] | Schema | None = None
    gives: type[pydantic.BaseModel] | Schema | None = None
    streams: bool = False
    text: str | None = None
    """The answer's media type if it is not JSON."""
    form: bool = False
    """The body is a form, not JSON."""


_TOKENIZE = Operation((vllm.TokenizeCompletionRequest, vllm.TokenizeChatRequest), vllm.TokenizeResponse)
_DETOKENIZE = Operation(vllm.DetokenizeRequest, vllm.DetokenizeResponse)

OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(vllm.ChatCompletionRequest, vllm.ChatCompletionResponse, streams=True),
    ("POST", "/v1/chat/completions/batch"): Operation(vllm.BatchChatCompletionRequest, vllm.ChatCompletionResponse),
    ("POST", "/v1/completions"): Operation(vllm.CompletionRequest, vllm.CompletionResponse, streams=True),
    ("POST", "/inference/v1/generate"): Operation(vllm.GenerateRequest, vllm.GenerateTokensResponse, streams=True),
    ("POST", "/v1/responses"): Operation(vllm.ResponsesRequest, _RESPONSE, streams=True),
    ("POST", "/v1/responses/input_tokens"): Operation(vllm.ResponsesRequest, _object("object", "input_tokens")),
    ("GET", "/v1/responses/{response_id}"): Operation(gives=_RESPONSE, streams=True),
    ("DELETE", "/v1/responses/{response_id}"): Operation(gives=_DELETED),
    ("POST", "/v1/responses/{response_id}/cancel"): Operation(gives=_RESPONSE),
    ("GET", "/v1/responses/{response_id}/input_items"): Operation(gives=_LIST),
    ("POST", "/v1/conversations"): Operation(conversations.NewConversation, _CONVERSATION),
    ("GET", "/v1/conversations/{conversation_id}"): Operation(gives=_CONVERSATION),
    ("POST", "/v1/conversations/{conversation_id}"): Operation(conversations.Metadata, _CONVERSATION),
    ("DELETE", "/v1/conversations/{conversation_id}"): Operation(gives=_DELETED),
    ("GET", "/v1/conversations/{conversation_id}/items"): Operation(gives=_LIST),
    ("POST", "/v1/conversations/{conversation_id}/items"): Operation(conversations.Items, _LIST),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(gives=_ITEM),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): Operation(gives=_CONVERSATION),
    ("POST", "/v1/files"): Operation(_UPLOAD, _FILE, form=True),
    ("GET", "/v1/files"): Operation(gives=_LIST),
    ("GET", "/v1/files/{file_id}"): Operation(gives=_FILE),
    ("DELETE", "/v1/files/{file_id}"): Operation(gives=_DELETED),
    ("GET", "/v1/files/{file_id}/content"): Operation(text="application/octet-stream"),
    ("POST", "/v1/batches"): Operation(batches.NewBatch, _BATCH),
    ("GET", "/v1/batches"): Operation(gives=_LIST),
    ("GET", "/v1/batches/{batch_id}"): Operation(gives=_BATCH),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(gives=_BATCH),
    ("POST", "/v1/messages"): Operation(vllm.AnthropicMessagesRequest, vllm.AnthropicMessagesResponse, streams=True),
    ("POST", "/v1/messages/count_tokens"): Operation(vllm.AnthropicCountTokensRequest, _object("input_tokens")),
    ("POST", "/v1/embeddings"): Operation((pooling.EmbeddingCompletionRequest, pooling.EmbeddingChatRequest), _LIST),
    ("POST", "/v1/score"): Operation(
        (
            pooling.ScoreTextRequest,
            pooling.ScoreDataRequest,
            pooling.ScoreQueriesDocumentsRequest,
            pooling.ScoreQueriesItemsRequest,
        ),
        _LIST,
    ),
    ("POST", "/v1/rerank"): Operation(pooling.RerankRequest, _object("results")),
    ("GET", "/v1/models"): Operation(gives=_LIST),
    ("GET", "/v1/models/{model_id}"): Operation(gives=_object("id", "object", "created", "owned_by")),
    ("POST", "/v1/load_lora_adapter"): Operation(vllm.LoadLoRAAdapterRequest, _object("message")),
    ("POST", "/v1/unload_lora_adapter"): Operation(vllm.UnloadLoRAAdapterRequest, _object("message")),
    ("POST", "/load_lora_adapter"): Operation(vllm.LoadLoRAAdapterRequest, _object("message")),
    ("POST", "/unload_lora_adapter"): Operation(vllm.UnloadLoRAAdapterRequest, _object("message")),
    ("POST", "/tokenize"): _TOKENIZE,
    ("POST", "/v1/tokenize"): _TOKENIZE,
    ("POST", "/detokenize"): _DETOKENIZE,
    ("POST", "/v1/detokenize"): _DETOKENIZE,
    ("GET", "/tokenizer_info"): Operation(gives=vllm.TokenizerInfoResponse),
    ("GET", "/livez"): Operation(gives=_object("status")),
    ("GET", "/liveness"): Operation(gives=_object("status")),
    ("GET", "/readyz"): Operation(gives=_object("status")),
    ("GET", "/health"): Operation(gives=_object("status")),
    ("GET", "/metrics"): Operation(text="text/plain"),
    ("GET", "/version"): Operation(gives=_object("version", "vllm")),
    ("GET", "/fleet"): Operation(gives={"type": "object"}),
    ("GET", "/admin/operations"): Operation(gives=_object("version", "operations")),
    ("GET", "/admin/operations/{operation_id}"): Operation(gives=_object("id")),
    ("POST", "/admin/{command}"): Operation(get_args(AnyCommand), _object("version", "dry_run", "effects", "operation")),
    ("POST", "/admin/reload"): Operation(gives=_object("changed", "needs_restart", "keys")),
    ("POST", "/pause"): Operation(gives=_object("status", "verifiers")),
    ("POST", "/resume"): Operation(gives=_object("status", "verifiers")),
    ("GET", "/is_paused"): Operation(gives=_object("is_paused")),
    ("POST", "/sleep"): Operation(gives=_object("verifiers")),
    ("POST", "/wake_up"): Operation(gives=_object("verifiers")),
    ("GET", "/is_sleeping"): Operation(gives=_object("is_sleeping")),
    ("POST", "/reset_prefix_cache"): Operation(gives=_object("verifiers")),
    ("POST", "/init_weight_transfer_engine"): Operation((weights.InitTransfer,), _object("verifiers")),
    ("POST", "/start_weight_update"): Operation(gives=_object("verifiers")),
    ("POST", "/update_weights"): Operation((weights.UpdateWeights,), _object("verifiers")),
    ("POST", "/finish_weight_update"): Operation((weights.FinishUpdate,), _object("verifiers", "weight_version")),
    ("POST", "/abort_requests"): Operation((weights.AbortRequests,), _object("status", "aborted", "token_ids")),
    ("GET", "/weight_info"): Operation(gives=_object("weight_version", "verifiers")),
    ("GET", "/get_world_size"): Operation(gives=_object("world_size")),
    ("GET", "/server_info"): Operation(gives=_object("weight_version", "verifiers")),
}

_OUTRIDER = {"outrider": {"$ref": _REF.format(model=Options.__name__)}}
_GENERATING = {**_OUTRIDER, "prediction": {"$ref": _REF.format(model=Prediction.__name__)}}
_OURS: dict[type[pydantic.BaseModel], dict[str, Schema]] = {
    vllm.ChatCompletionRequest: {**_GENERATING, "tool_choice": _object("allowed_tools", type={"const": "allowed_tools"})},
    vllm.CompletionRequest: _GENERATING,
    vllm.GenerateRequest: _GENERATING,
    vllm.ResponsesRequest: {**_OUTRIDER, "conversation": {"anyOf": [_STRING, _object("id", id=_STRING)]}},
    vllm.AnthropicMessagesRequest: _OUTRIDER,
}
"""Fields, and values of vLLM's fields, that the routes read themselves."""

_NO_EFFECT = {
    vllm.ResponsesRequest: RESPONSES_NO_EFFECT,
    vllm.AnthropicMessagesRequest: MESSAGES_NO_EFFECT,
    vllm.AnthropicCountTokensRequest: MESSAGES_NO_EFFECT,
}


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """The document of all routes except those of pages.  Raises `KeyError` for a route without an entry in `OPERATIONS`."""
    schemas = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for method, path, route in routes(app):
        shown = _operation(OPERATIONS[method, path], path, schemas)
        shown |= {
            "summary": (route.description or "").partition("\n")[0],
            "operationId": route.name,
            "tags": [path.split("/")[1]],
        }
        parameters = [_parameter(each, "path") for each in route.dependant.path_params]
        parameters += [_parameter(each, "query") for each in route.dependant.query_params]
        paths.setdefault(path, {})[method.lower()] = shown | ({"parameters": parameters} if parameters else {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def routes(app: FastAPI) -> Iterable[tuple[str, str, APIRoute]]:
    """Method, path without converters, and route."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in sorted(route.methods - {"HEAD"}):
                yield method, re.sub(r":\w+}", "}", route.path), route


def _schemas() -> dict[str, Schema]:
    taken = {each for operation in OPERATIONS.values() for each in _models(operation.takes)}
    given = {each for operation in OPERATIONS.values() for each in _models(operation.gives)}
    pydantics = [each for each in taken | given if issubclass(each, pydantic.BaseModel)]
    models: set[type[pydantic.BaseModel]] = {*pydantics, Options, Prediction}
    shown = sorted(models, key=str)
    _, made = models_json_schema([(each, "validation") for each in shown], ref_template=_REF)
    schemas: dict[str, Schema] = made["$defs"]
    for model in taken & set(pydantics):
        properties = schemas[model.__name__]["properties"]
        for name, each in _OURS.get(model, {}).items():
            properties[name] = {"anyOf": [properties[name], each]} if name in properties else each
        no_effect = {} if issubclass(model, Body) else _NO_EFFECT.get(model, NO_EFFECT)
        _as_taken(schemas[model.__name__], no_effect.keys())
    structs = sorted(taken - set(pydantics), key=str)
    _, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    for struct in structs:
        # The URL's path contains the command.
        components[struct.__name__]["properties"].pop("command", None)
        components[struct.__name__]["required"] = [
            each for each in components[struct.__name__]["required"] if each != "command"
        ]
    return {**schemas, **components, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}


def _as_taken(schema: Schema, no_effect: Iterable[str]) -> None:
    """Fits a schema to `gateway.requests.parse`: fields may be null, and unknown fields are refused."""
    properties = schema["properties"]
    for name in REFUSED:
        properties.pop(name, None)
    properties.update({name: {"description": "without effect"} for name in no_effect})
    required = schema.get("required", [])
    schema["properties"] = {
        name: each if name in required else {"anyOf": [each, {"type": "null"}]} for name, each in properties.items()
    }
    schema["additionalProperties"] = False


def _models(value: Any) -> list[type[Any]]:
    if value is None or isinstance(value, dict):
        return []
    return list(value) if isinstance(value, tuple) else [value]


def _ref(value: Any) -> Schema:
    if isinstance(value, dict):
        return value
    refs = [{"$ref": _REF.format(model=each.__name__)} for each in _models(value)]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _operation(operation: Operation, path: str, schemas: dict[str, Schema]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.gives is not None:
        content["application/json"] = {"schema": _ref(operation.gives)}
    if operation.streams:
        # OpenAPI 3.1 has no schema for the events of a stream.
        content["text/event-stream"] = {}
    if operation.text is not None:
        content[operation.text] = {"schema": _STRING}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    shown: dict[str, Any] = {
        "responses": {
            "200": {"description": "Done.", "content": content},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model=error)}}},
            },
        }
    }
    if path == "/admin/{command}":
        shown["responses"]["202"] = {"description": "An operation will do it.", "content": content}
    if operation.takes is not None:
        media = "multipart/form-data" if operation.form else "application/json"
        shown["requestBody"] = {"required": True, "content": {media: {"schema": _ref(operation.takes)}}}
    return shown


def _parameter(field: Any, place: str) -> dict[str, Any]:
    schema = pydantic.TypeAdapter(field.field_info.annotation).json_schema()
    return {"name": field.alias, "in": place, "required": place == "path", "schema": schema}
