"""The gateway over HTTP, whole, in front of a fake verifier: everything but streams."""

import json
import socket

import pytest

from gateway.cli.preflight import listen
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import CHAT, COMPLETION, MODEL_DIR, running_gateway

LONG, GENERATE = "x y z " * 300, "/inference/v1/generate"

ERRORS = [
    # method, path, body or raw content, headers, status, param, code
    ("GET", "/nowhere", None, {}, 404, None, "not_found"),
    ("GET", "/v1/models/nope", None, {}, 404, "model", "model_not_found"),
    ("GET", "/v1/completions", None, {}, 405, None, "method_not_allowed"),
    ("POST", "/v1/completions", b"{", {"content-type": "application/json"}, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b"[]", {"content-type": "application/json"}, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b'{"temperature": NaN}', {"content-type": "application/json"}, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b'{"temperature": 1e999}', {"content-type": "application/json"}, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400, None, "invalid_json"),
    ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415, None, "unsupported_media_type"),
    ("POST", "/v1/completions", b"{}", {}, 415, None, "unsupported_media_type"),
    ("POST", "/v1/completions", b" " * ((20 << 20) + 1), {"content-type": "application/json"}, 413, None, "payload_too_large"),
    ("POST", "/v1/completions", {**COMPLETION, "model": "nope"}, {}, 404, "model", "model_not_found"),
    ("POST", "/v1/completions", {**COMPLETION, "prompt": LONG, "stream": True}, {}, 400, None, "context_length_exceeded"),
    ("POST", "/v1/chat/completions", {**CHAT, "temprature": 1}, {}, 400, "temprature", "unknown_parameter"),
    ("POST", "/v1/chat/completions", {"model": "demo"}, {}, 400, "messages", None),
    ("POST", "/v1/chat/completions", {**CHAT, "temperature": -1, "stream": True}, {}, 400, "temperature", None),
    ("POST", "/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}}, {}, 400, "stream_options", None),
    ("POST", "/v1/chat/completions", {**CHAT, "top_k": 10**30}, {}, 400, None, None),
    ("POST", "/v1/chat/completions", {**CHAT, "tool_choice": "required"}, {}, 400, "tool_choice", None),
    ("POST", "/tokenize", {"model": "nope", "prompt": "x"}, {}, 404, "model", "model_not_found"),
    ("POST", GENERATE, {"model": "nope", "token_ids": [5], "sampling_params": {}}, {}, 404, "model", "model_not_found"),
]


PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]


async def test_errors_have_one_shape_on_every_status():
    async with running_gateway() as running:
        for method, path, body, headers, status, param, code in ERRORS:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = await running.http.request(method, path, headers=headers, **content)
            label = f"{method} {path} {str(body)[:60]}"
            assert response.status_code == status, f"{label}: {response.text}"
            assert response.headers["content-type"] == "application/json", label
            error = response.json()["error"]
            assert list(error) == ["message", "type", "param", "code"], label
            assert (error["param"], error["code"]) == (param, code), f"{label}: {error}"
            assert error["message"], label
            assert response.headers["x-request-id"], label
        response = await running.http.post("/v1/chat/completions", json={**CHAT, "messages": PICTURE})
        assert response.status_code == 400
        assert MODEL_DIR not in response.text
        assert running.idle
        # After all that, it still serves.
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_unexpected_exceptions_say_nothing(running, monkeypatch):
    async def fail(*args):
        raise KeyError("/srv/secret/path")

    monkeypatch.setattr(running.server.gateway.services.chat, "_create_chat_completion", fail)
    response = await running.http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


async def test_a_gateway_that_can_serve_no_more_asks_to_be_restarted():
    async with running_gateway() as running:
        assert running.server.gateway.client.output_handler is not None
        running.server.gateway.client.output_handler.cancel()
        await eventually(lambda: running.server.gateway.client.errored)
        assert (await running.http.get("/livez")).status_code == 500
        assert (await running.http.get("/readyz")).status_code == 503


async def test_a_model_of_several_names():
    async with running_gateway(served_model_name="org/our-model, gpt-4") as running:
        cards = (await running.http.get("/v1/models")).json()["data"]
        names = ("org/our-model", "gpt-4")
        assert [(card["id"], card["root"]) for card in cards] == [(name, "org/our-model") for name in names]
        for name in names:
            body = (await running.http.post("/v1/completions", json={**COMPLETION, "model": name})).json()
            assert body["model"] == "org/our-model"
        assert (await running.http.post("/v1/completions", json=COMPLETION)).status_code == 404


async def test_tokenize_round_trip(running):
    for prefix in ("", "/v1"):
        tokens = (await running.http.post(f"{prefix}/tokenize", json={"prompt": "def f("})).json()["tokens"]
        text = (await running.http.post(f"{prefix}/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text.endswith("def f(")
    messages = await running.http.post("/tokenize", json={"messages": CHAT["messages"]})
    assert messages.json()["count"] > 0
    assert messages.json()["token_strs"] is None
    about = await running.http.get("/tokenizer_info")
    assert about.json()["chat_template"]
    assert MODEL_DIR not in about.text


async def test_many_conversations_in_one_request(running):
    path, conversations = "/v1/chat/completions/batch", [CHAT["messages"], [{"role": "user", "content": "a longer one"}]]
    response = await running.http.post(path, json={**CHAT, "messages": conversations})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    alone = [
        (await running.http.post("/v1/chat/completions", json={**CHAT, "messages": each})).json() for each in conversations
    ]
    assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    for wrong in ({"messages": conversations * 300}, {"messages": CHAT["messages"]}, {"n": 2}, {"stream": True}):
        refused = await running.http.post(path, json={**CHAT, "messages": conversations, **wrong})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == next(iter(wrong)), refused.text


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", COMPLETION, "cmpl-"),
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 2}}, ""),
    ],
)
async def test_a_body_may_name_its_request(running, path, body, prefix):
    named = {**body, "request_id": "mine-8"}
    answer = await running.http.post(path, json=named)
    assert answer.headers["x-request-id"] == "mine-8"
    assert answer.json().get("id", answer.json().get("request_id")).endswith(f"{prefix}mine-8")
    assert "mine-8" in running.verifier.sequences[-1].request.request_id
    answer = await running.http.post(path, json=named, headers={"x-request-id": "header-9"})
    assert answer.headers["x-request-id"] == "header-9"
    for wrong in ("a b", "", "x" * 129, 5):
        answer = await running.http.post(path, json={**body, "request_id": wrong})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id"), wrong


async def test_readiness_follows_the_verifiers():
    async with running_gateway(verifiers=0) as running:
        assert (await running.http.get("/livez")).status_code == 200
        answers = [await running.http.get(path) for path in ("/readyz", "/health")]
        answers += [await running.http.post("/v1/completions", json={**COMPLETION, "stream": each}) for each in (False, True)]
        for response in answers:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_verifier_ready")
            assert int(response.headers["retry-after"]) >= 1


async def test_nothing_of_a_prompt_is_logged(running, caplog):
    caplog.set_level("DEBUG")
    body = {**COMPLETION, "prompt": "tangerine"}
    answer = (await running.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    await running.http.post("/v1/completions", json={**body, "stream": True})
    await running.http.post("/v1/completions", json={**body, "temperature": -1})
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "asyncio"))]
    logged = json.dumps([record.getMessage() for record in ours])
    assert "tangerine" not in logged
    assert answer not in logged


def test_connections_do_not_wait_to_fill_packets():
    listener = listen("127.0.0.1", 0)
    with listener:
        assert listener.proto == socket.IPPROTO_TCP


async def test_answers_have_the_limit_of_the_generation_config():
    async with running_gateway(engine_args={"override_generation_config": {"max_new_tokens": 7}}) as running:
        for path, fields, limits in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "max_completion_tokens"),
            ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ):
            for limit, tokens in (({}, 7), ({limits: 5}, 5), ({limits: 9}, 7)):
                usage = (await running.http.post(path, json={"model": "demo", **fields, **limit})).json()["usage"]
                assert usage.get("completion_tokens", usage.get("output_tokens")) == tokens
