"""The API's document: every route is in it, and answers are as it says."""

from typing import Any

from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from tests.support.running_gateway import CHAT, COMPLETION, RESPONSE

OUTRIDER = {"outrider": {"stats": True, "mode": "off"}}
PREDICTION = {"prediction": {"type": "content", "content": "x = 1"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLABLE = {"mode": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": CALLABLE}
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**CHAT, **OUTRIDER, **PREDICTION, "store": True, "verbosity": "low", "temperature": None}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS, "tool_choice": ALLOWED, "max_tokens": 200}),
    ("/v1/completions", {**COMPLETION, **OUTRIDER, **PREDICTION, "best_of": 1, "top_k": 3}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 6}, **OUTRIDER, **PREDICTION}),
    ("/v1/responses", {**RESPONSE, **OUTRIDER, "conversation": None, "previous_response_id": None}),
    ("/v1/responses", {**RESPONSE, "input": [{"role": "user", "content": "hi"}], "include": ["reasoning.encrypted_content"]}),
    ("/v1/responses", {**RESPONSE, "context_management": [], "stream_options": {"include_obfuscation": False}}),
    ("/v1/messages", {**CHAT, **OUTRIDER, "inference_geo": "eu", "top_k": 5, "system": [{"type": "text", "text": "brief"}]}),
]


async def test_every_route_is_documented_and_nothing_else(running):
    app = running.uvicorn.config.app
    while not hasattr(app, "routes"):
        app = app.app
    document = (await running.http.get("/openapi.json")).json()
    shown = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (method, route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - {"HEAD"}
    }
    pages = {("GET", path) for path in ("/", "/page/{name}", "/openapi.json")}
    assert shown == served - pages
    assert len(shown) > 60
    limit = next(each for each in document["paths"]["/v1/batches"]["get"]["parameters"] if each["name"] == "limit")
    assert limit["schema"] == {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len({*names})


async def test_what_is_taken_is_documented(running):
    document = (await running.http.get("/openapi.json")).json()
    made = (await running.http.post("/v1/conversations", json={})).json()["id"]
    conversations = [("/v1/responses", {**RESPONSE, "conversation": each}) for each in (made, {"id": made})]
    for path, body in (*TAKEN, *conversations):
        answer = await running.http.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        Draft202012Validator({**schema, "components": document["components"]}).validate(body)
