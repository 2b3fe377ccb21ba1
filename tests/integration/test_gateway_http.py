"""Routes and answers of a whole gateway over HTTP, in front of a fake verifier; /inference/v1/generate among them."""

import socket

import pytest

from gateway.cli.preflight import listen
from tests.support.fake_verifier import eventually
from tests.support.running_gateway import CHAT, COMPLETION, MODEL_DIR, refusal, running_gateway

GENERATE = "/inference/v1/generate"
TOKENS = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}


async def test_unexpected_exceptions_say_nothing(running, monkeypatch):
    async def fail(*args):
        raise KeyError("/srv/secret/path")

    monkeypatch.setattr(running.server.gateway.services.chat, "_create_chat_completion", fail)
    response = await running.http.post("/v1/chat/completions", json=CHAT)
    assert refusal(response) == (500, "internal_error")
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


@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/v1/completions", COMPLETION, "cmpl-"),
        ("/v1/chat/completions", CHAT, "chatcmpl-"),
        (GENERATE, TOKENS, ""),
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
        assert refusal(await running.http.post(path, json={**body, "request_id": wrong})) == (400, "request_id"), wrong


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


async def test_several_samples_with_an_account_and_arguments_of_which_the_verifiers_own_are_left_out(running):
    given = {"prl_compact_logprobs": True, "outrider_request_id": "mine", "outrider_noise_seed": 7, "kv_transfer_params": {}}
    sampling = {"max_tokens": 3, "n": 3, "seed": 1, "extra_args": given}
    body = {**TOKENS, "sampling_params": sampling, "outrider": {"stats": True}, "cache_salt": "salt"}
    answer = (await running.http.post(GENERATE, json=body, headers={"X-Session-ID": "episode"})).json()
    assert [(choice["index"], len(choice["token_ids"])) for choice in answer["choices"]] == [(0, 3), (1, 3), (2, 3)]
    assert [each["index"] for each in answer["outrider"]["choices"]] == [0, 1, 2]
    request = running.verifier.sequences[-1].request
    assert request.cache_salt == "salt"
    assert request.sampling_params.extra_args == {"prl_compact_logprobs": True, "outrider_request_id": "mine"}
