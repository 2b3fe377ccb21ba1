"""Makes /openapi.json: every route with its request and answer, from the models that the routes use."""

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import pydantic
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from backend.engine import front as vllm
from gateway.auth.rights import Right
from gateway.requests.body import Body
from gateway.requests.fields import MESSAGES_NO_EFFECT, NO_EFFECT, REFUSED, RESPONSES_NO_EFFECT
from gateway.requests.options import Options, Prediction

_REF = "#/components/schemas/{model}"
Schema = dict[str, Any]


def shape(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


STRING: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}
_ERROR = shape(
    "error", error=shape(*("message", "type", "param", "code"), message=STRING, type=STRING, param=_NULLABLE, code=_NULLABLE)
)
_ANTHROPIC_ERROR = shape("type", "error", type={"const": "error"}, error=shape("type", "message", type=STRING, message=STRING))
LIST = shape("object", "data", object={"const": "list"}, data={"type": "array", "items": {"type": "object"}})
RESPONSE = shape("id", "object", "status", "output", "created_at", object={"const": "response"})
DELETED = shape("id", "object", "deleted", id=STRING, deleted={"const": True})
CONVERSATION = shape("id", "object", "created_at", "metadata", object={"const": "conversation"})
ITEM = shape("id", id=STRING)
UPLOAD = shape("file", "purpose", file={"type": "string", "format": "binary"}, purpose={"const": "batch"})


def described(
    takes: type[pydantic.BaseModel] | tuple[type[Any], ...] | Schema | None = None,
    gives: type[pydantic.BaseModel] | Schema | None = None,
    *,
    streams: bool = False,
    text: str | None = None,
    form: bool = False,
    right: Right,
) -> dict[str, Any]:
    """Arguments of a route's decorator, which tell `document` of the route, and `Access` who may call it.

    `takes`: the body's model or schema; `gives`: the answer's; `streams`: the answer may be server-sent events; `text`: the
    answer's media type if it is not JSON; `form`: the body is a form, which goes to disk, not JSON; `right`: what the caller
    needs.
    """
    content: dict[str, Any] = {}
    if gives is not None:
        content["application/json"] = {"schema": _ref(gives)}
    if streams:
        # OpenAPI 3.1 has no schema for the events of a stream.
        content["text/event-stream"] = {}
    if text is not None:
        content[text] = {"schema": STRING}
    shown: dict[str, Any] = {"responses": {"200": {"description": "Done.", "content": content}}}
    if takes is not None:
        media = "multipart/form-data" if form else "application/json"
        shown["requestBody"] = {"required": True, "content": {media: {"schema": _ref(takes)}}}
    return {"openapi_extra": {"shown": shown, "takes": _models(takes), "gives": _models(gives), "right": right, "form": form}}


UNDESCRIBED: dict[str, Any] = {"include_in_schema": False, "openapi_extra": {"right": Right.NOTHING}}
"""Arguments of the decorator of a page's route, or of the document's own."""

_OUTRIDER = {"outrider": {"$ref": _REF.format(model=Options.__name__)}}
_GENERATING = {**_OUTRIDER, "prediction": {"$ref": _REF.format(model=Prediction.__name__)}}
_OURS: dict[type[pydantic.BaseModel], dict[str, Schema]] = {
    vllm.ChatCompletionRequest: {**_GENERATING, "tool_choice": shape("allowed_tools", type={"const": "allowed_tools"})},
    vllm.CompletionRequest: _GENERATING,
    vllm.GenerateRequest: _GENERATING,
    vllm.ResponsesRequest: {**_OUTRIDER, "conversation": {"anyOf": [STRING, shape("id", id=STRING)]}},
    vllm.AnthropicMessagesRequest: _OUTRIDER,
}
"""Fields, and values of vLLM's fields, that the routes read themselves."""

_NO_EFFECT = {
    vllm.ResponsesRequest: RESPONSES_NO_EFFECT,
    vllm.AnthropicMessagesRequest: MESSAGES_NO_EFFECT,
    vllm.AnthropicCountTokensRequest: MESSAGES_NO_EFFECT,
}


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """The document of all routes except those of pages."""
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for method in sorted(route.methods - {"HEAD"}):
            paths.setdefault(route.path_format, {})[method.lower()] = _operation(route, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Outrider", "version": version},
        "paths": paths,
        "components": {
            "schemas": _schemas([route.openapi_extra for route in routes]),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: APIRoute, method: str) -> dict[str, Any]:
    path, shown = route.path_format, {**(route.openapi_extra or {})["shown"]}
    error = {"$ref": _REF.format(model="AnthropicError" if path.startswith("/v1/messages") else "Error")}
    failed = {"description": "An error.", "content": {"application/json": {"schema": error}}}
    shown["responses"] = {**shown["responses"], "default": failed}
    if path == "/admin/{command}":
        shown["responses"]["202"] = {**shown["responses"]["200"], "description": "An operation will do it."}
    parameters = [_parameter(field, "path") for field in route.dependant.path_params]
    parameters += [_parameter(field, "query") for field in route.dependant.query_params]
    return {
        **shown,
        "summary": (route.description or "").partition("\n")[0],
        "operationId": re.sub(r"\W", "_", f"{route.name}{path}_{method.lower()}"),
        "tags": [path.split("/")[1]],
        **({"parameters": parameters} if parameters else {}),
    }


def _schemas(operations: list[Any]) -> dict[str, Schema]:
    taken: set[type[Any]] = {each for operation in operations for each in operation["takes"]}
    given: set[type[Any]] = {each for operation in operations for each in operation["gives"]}
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
    """Fits a schema to `gateway.requests.body.parse`: fields may be null, and unknown fields are refused."""
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


def _parameter(field: Any, place: str) -> dict[str, Any]:
    schema = pydantic.TypeAdapter(Annotated[field.field_info.annotation, field.field_info]).json_schema()
    return {"name": field.alias, "in": place, "required": place == "path", "schema": schema}
