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
    ("field", "hint"),
    [
        ("temprature", "Did you mean `temperature`?"),
        ("max_token", "Did you mean `max_tokens`?"),
        ("guided_json", "use `structured_outputs`"),
        ("functions", "use `tools`"),
    ],
)
def test_unknown_fields_are_named_with_the_nearest_valid_one(field, hint):
    error = refused(check_fields, ChatCompletionRequest, {**CHAT, field: 1}, NO_EFFECT)
    assert error.param == field
    assert field in error.message
    assert hint in error.message


@pytest.mark.parametrize(("field", "value"), [("store", 1.5), ("service_tier", "gold"), ("best_of", 3), ("audio", {})])
def test_values_that_would_have_an_effect_are_refused(field, value):
    assert refused(check_fields, CompletionRequest, {"prompt": "x", field: value}, NO_EFFECT).param == field


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


def test_of_several_wrong_fields_one_is_named():
    for wrong in ({"messages": 5, "tools": 5}, {"structured_outputs": "x", "temperature": "x"}):
        assert refused(read, ChatCompletionRequest, {**CHAT, **wrong}).param in wrong
    error = refused(read, CompletionRequest, {"structured_outputs": "x", "prompt": "x", "temperature": "x"})
    assert (error.param, error.message) == ("structured_outputs", "`structured_outputs` has the wrong type.")


def test_nested_stream_options_are_checked():
    body = {**CHAT, "stream": True, "stream_options": {"include_usages": True}}
    error = refused(check_fields, ChatCompletionRequest, body, NO_EFFECT)
    assert error.param == "stream_options"
    assert "include_usage" in error.message


def test_what_vllm_understands_is_never_without_effect():
    for model in (ChatCompletionRequest, CompletionRequest):
        assert not model.model_fields.keys() & NO_EFFECT.keys()
    assert not NO_EFFECT.keys() & REFUSED.keys()


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


def test_without_speculation_min_p_and_logit_bias_are_fine():
    request = read(ChatCompletionRequest, {**CHAT, "min_p": 0.1, "logit_bias": {"5": 1.0}, "n": MAX_CHOICES})
    check_generation(request, vllm_speculates=False)


SAYS = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


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


def test_the_text_of_a_part_is_text():
    messages = [SAYS, {"role": "user", "content": [PART, {"type": "text", "text": 5}]}]
    error = refused(read, ChatCompletionRequest, {"model": "m", "messages": messages})
    assert (error.param, error.message) == ("messages", "`messages[1].content[1].text` must be a string.")


def test_lists_in_messages_stay_what_they_are():
    messages = [{"role": "user", "content": [PART, PART]}, {"role": "assistant", "content": [PART], "tool_calls": [CALL]}]
    assert read(ChatCompletionRequest, {"model": "m", "messages": messages}).messages == messages


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


def test_an_item_whose_type_is_null_is_a_message():
    (item,) = as_items(decoded([{"type": None, "role": "user", "content": "x"}]))
    assert item["type"] == "message"
