"""/inference/v1/generate in front of fake verifiers: vLLM's shape, our checks."""

from typing import Any

import pytest

from tests.support.running_gateway import events

URL = "/inference/v1/generate"


def request_body(**fields: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}, **fields}


async def test_token_ids_come_back(running):
    answer = (await running.http.post(URL, json=request_body())).json()
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == 4
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == 3
    assert running.verifier.sequences[-1].request.prompt_token_ids == [5, 6, 7]


async def test_several_samples_with_a_session_and_an_account(running):
    body = request_body(sampling_params={"max_tokens": 3, "n": 3, "seed": 1}, outrider={"stats": True}, cache_salt="salt")
    answer = (await running.http.post(URL, json=body, headers={"X-Session-ID": "episode"})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(len(choice["token_ids"]) == 3 for choice in answer["choices"])
    assert [each["index"] for each in answer["outrider"]["choices"]] == [0, 1, 2]
    assert running.verifier.sequences[-1].request.cache_salt == "salt"


async def test_a_stream(running):
    body = request_body(stream=True, stream_options={"include_usage": True})
    chunks = events((await running.http.post(URL, json=body)).content)
    assert sum(len(choice["token_ids"]) for chunk in chunks for choice in chunk["choices"]) == 4
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_arguments_of_others_are_taken_and_those_of_the_verifier_are_not(running):
    given = {"prl_compact_logprobs": True, "outrider_request_id": "mine", "outrider_noise_seed": 7, "kv_transfer_params": {}}
    await running.http.post(URL, json=request_body(sampling_params={"max_tokens": 4, "extra_args": given}))
    kept = {"prl_compact_logprobs": True, "outrider_request_id": "mine"}
    assert running.verifier.sequences[-1].request.sampling_params.extra_args == kept


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokns": 4}}, "sampling_params"),
        ({"sampling_params": {"extra_args": {"outrider_fixed_response": [1]}}}, "sampling_params"),
        ({"sampling_params": {"extra_args": [1]}}, "sampling_params"),
        ({"sampling_params": {"extra_args": {"a": "x" * 2**17}}}, "extra_args"),
        ({"sampling_params": {"n": 1000}}, "n"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, "a"]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [10**7]}, None),
        ({"token_ids": [5] * 100_000}, None),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"tokens": [1]}, "tokens"),
    ],
)
async def test_bad_input_is_named(running, fields, named):
    answer = await running.http.post(URL, json=request_body(**fields))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert named is None or error["param"] == named, error
