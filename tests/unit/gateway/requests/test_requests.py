import json
import re
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from backend.engine.front import AnthropicMessagesRequest, BatchChatCompletionRequest, GenerateRequest, ResponseRequest
from backend.engine.front.config import PARAMETERS
from gateway.http.errors import translate
from gateway.requests.body import check_fields, check_generation, decode, parse
from gateway.requests.fields import GENERATING, MESSAGING, NO_EFFECT, REFUSED, RESPONDING
from gateway.requests.limits import MAX_CHOICES, check_bounds
from gateway.storage.responses.turn import as_items
from tests.support.refused import refused

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(model: Any, body: dict[str, Any], others: Any = NO_EFFECT) -> Any:
    """As routes do."""
    check_bounds(body)
    return parse(model, body, others)


@pytest.mark.parametrize(
    ("fields", "named", "hint"),
    [
        ({"temprature": 1}, "temprature", "Did you mean `temperature`?"),
        ({"max_token": 1}, "max_token", "Did you mean `max_tokens`?"),
        ({"guided_json": 1}, "guided_json", "use `structured_outputs`"),
        ({"functions": 1}, "functions", "use `tools`"),
        ({"stream_options": {"include_usages": True}, "stream": True}, "include_usages", "Did you mean `include_usage`?"),
        # Values that would have an effect.
        *(({name: value}, name, "") for name, value in (("store", 1.5), ("service_tier", "x"), ("best_of", 3), ("audio", {}))),
    ],
)
def test_unknown_fields_and_values_are_named_with_the_nearest_valid_one(fields, named, hint):
    error = refused(check_fields, ChatCompletionRequest, {**CHAT, **fields}, NO_EFFECT)
    assert error.param == next(iter(fields))
    assert named in error.message
    assert hint in error.message


REQUESTS: list[tuple[Any, dict[str, Any], Any]] = [
    (ChatCompletionRequest, CHAT, GENERATING),
    (CompletionRequest, {"model": "m", "prompt": "x"}, GENERATING),
    (ResponseRequest, {"model": "m", "input": [{"role": "user", "content": []}]}, RESPONDING),
    (AnthropicMessagesRequest, {**CHAT, "max_tokens": 3}, MESSAGING),
    (GenerateRequest, {"token_ids": [1], "sampling_params": {}}, GENERATING),
]


@pytest.mark.parametrize(("model", "body", "others"), REQUESTS)
def test_the_wrong_type_of_any_field_is_an_error_that_names_it(model, body, others):
    read(model, body, others)
    values: list[Any] = [5, 1e300, "x", True, [5], ["x"], [{}], [[]], {"a": 5}]
    for name in model.model_fields:
        for value in values:
            try:
                read(model, {**body, name: value}, others)
            except Exception as error:
                ours = translate(error)
                assert (ours.status, ours.param is not None) == (400, True), f"{name}: {value}: {ours.message}"


def test_of_several_wrong_fields_one_is_named_and_what_vllm_understands_is_never_without_effect():
    assert not NO_EFFECT.keys() & {*REFUSED, *ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    for wrong in ({"messages": 5, "tools": 5}, {"structured_outputs": "x", "temperature": "x"}):
        assert refused(read, ChatCompletionRequest, {**CHAT, **wrong}).param in wrong
    error = refused(read, CompletionRequest, {"structured_outputs": "x", "prompt": "x", "temperature": "x"})
    assert (error.param, error.message) == ("structured_outputs", "`structured_outputs` has the wrong type.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": 0}, "n"),
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"vllm_xargs": {"outrider_fixed_response": [1, 2]}}, "vllm_xargs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields, param):
    request = read(ChatCompletionRequest, {**CHAT, **fields})
    assert refused(check_generation, request, vllm_speculates=True).param == param
    fine = read(ChatCompletionRequest, {**CHAT, "min_p": 0.1, "logit_bias": {"5": 1.0}, "n": MAX_CHOICES})
    check_generation(fine, vllm_speculates=False)


SAYS = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": [{"type": "text"}]}, "content.0.text"),
        ({"role": "assistant", "content": "x", "tool_calls": [CALL, {**CALL, "id": 5}]}, "tool_calls.1.id"),
    ],
)
def test_an_error_in_a_list_within_a_message_names_the_message(message, place):
    for model, messages, index in (
        (ChatCompletionRequest, [SAYS, message], "1"),
        (BatchChatCompletionRequest, [[SAYS], [SAYS, SAYS, message]], "1.2"),
    ):
        error = refused(read, model, {"model": "m", "messages": messages})
        assert (error.param, error.message.partition(": ")[0]) == ("messages", f"messages.{index}.{place}")


def test_lists_in_messages_stay_what_they_are_and_the_text_of_a_part_is_text():
    messages = [{"role": "user", "content": [PART, PART]}, {"role": "assistant", "content": [PART], "tool_calls": [CALL]}]
    assert read(ChatCompletionRequest, {"model": "m", "messages": messages}).messages == messages
    messages[0]["content"] = [PART, {"type": "text", "text": 5}]
    error = refused(read, ChatCompletionRequest, {"model": "m", "messages": messages})
    assert (error.param, error.message) == ("messages", "`messages[0].content[1].text` must be a string.")


def decoded(body: Any) -> Any:
    return decode(bytearray(json.dumps(body).encode()))


SCHEMA = {"type": "object", "properties": {"a": {"enum": [None], "default": None}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ANSWER, OUTPUT = {"type": "message", "role": "assistant"}, {"type": "output_text", "text": "a"}
NULLS: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = [
    (GenerateRequest, GENERATING, {"token_ids": [1], "sampling_params": {}}, {"sampling_params": dict.fromkeys(PARAMETERS)}),
    (ChatCompletionRequest, GENERATING, {**CHAT, "tools": [TOOL]}, {"tools": [{**TOOL, "strict": None}]}),
    (
        ResponseRequest,
        RESPONDING,
        {"input": [{**ANSWER, "content": [OUTPUT]}]},
        {"input": [{**ANSWER, "id": None, "status": None, "content": [{**OUTPUT, "annotations": None, "logprobs": None}]}]},
    ),
]


@pytest.mark.parametrize(("model", "others", "body", "nested"), NULLS)
def test_a_request_with_nulls_is_the_request_without(model, others, body, nested):
    nulls = dict.fromkeys(model.model_fields.keys() - body.keys())
    made = [read(model, decoded(each), others) for each in (body, {**nulls, **body, **nested})]
    plain, with_nulls = (re.sub(r"msg_\w+", "", str(each.model_dump(exclude={"request_id"}))) for each in made)
    assert with_nulls == plain
    (item,) = as_items(decoded([{"type": None, "role": "user", "content": "x"}]))
    assert item["type"] == "message"
