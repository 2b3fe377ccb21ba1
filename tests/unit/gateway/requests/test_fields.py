"""The tables of request fields: what they do, and that the docs say the same."""

import re
from typing import Any, get_args

import pydantic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses import ResponseIncludable
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from backend.engine.front import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResponseRequest,
    VLLMClientError,
)
from gateway.requests.body import check_fields, parse
from gateway.requests.fields import (
    GENERATING,
    MESSAGES_NO_EFFECT,
    MESSAGING,
    NO_EFFECT,
    REFUSED,
    RESPONDING,
    RESPONSES_NO_EFFECT,
    drop_nulls,
)
from tests.support.processes import ROOT
from tests.support.refused import refused

DOCS = (ROOT / "docs" / "reference" / "api.md").read_text()


def test_every_field_is_in_the_docs():
    assert not [name for name in {*NO_EFFECT, *RESPONSES_NO_EFFECT, *MESSAGES_NO_EFFECT, *REFUSED} if f"`{name}`" not in DOCS]


def rows() -> dict[str, tuple[str, str]]:
    """What the docs say of a field, or of a value of `include`, in chat completions and in responses."""
    table = DOCS.partition("| OpenAI's field | chat | responses |\n|---|---|---|\n")[2].partition("\n\n")[0]
    found: dict[str, tuple[str, str]] = {}
    for line in table.splitlines():
        names, chat, responses = line.strip("| ").split(" | ")
        for name in re.findall(r"`([^`]+)`", names.removeprefix("`include`: ")):
            assert name not in found, name
            found[name] = chat, responses
    return found


CALLS = [
    (0, CompletionCreateParamsBase, ChatCompletionRequest, GENERATING, {"messages": [{"role": "user", "content": "x"}]}),
    (1, ResponseCreateParamsBase, ResponseRequest, {**RESPONDING, "conversation": NO_EFFECT["metadata"]}, {"input": []}),
]


@pytest.mark.parametrize(("column", "params", "model", "others", "body"), CALLS)
def test_the_docs_say_of_each_of_openais_fields_what_it_does(column, params, model, others, body):
    fields = {*params.__annotations__, "stream"} - {"include"}
    documented = {
        name: row[column] for name, row in rows().items() if row[column] != "-" and name not in get_args(ResponseIncludable)
    }
    assert documented.keys() == fields
    for name in fields:
        if name in REFUSED or name not in {*model.model_fields, *others}:
            assert documented[name].startswith("refused"), name
        elif name in (NO_EFFECT, RESPONSES_NO_EFFECT)[column]:
            assert documented[name].startswith("no effect"), name
        elif documented[name].startswith("refused"):
            with pytest.raises(VLLMClientError):
                parse(model, {**body, name: {"id": "x"}}, others)


def test_the_docs_say_of_each_value_of_include_what_it_does():
    for value in get_args(ResponseIncludable):
        body = {"input": [], "include": [value]}
        if rows()[value][1].startswith("refused"):
            with pytest.raises(pydantic.ValidationError):
                parse(ResponseRequest, body, RESPONDING)
        else:
            works = parse(ResponseRequest, body, RESPONDING).is_include_output_logprobs()
            assert rows()[value][1].startswith("works" if works else "no effect"), value


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (message_create_params.MessageCreateParamsBase, AnthropicMessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, AnthropicCountTokensRequest),
    ],
)
def test_each_of_anthropics_fields_is_known(params, model):
    headers = {"user_profile_id", "workspace_id"}
    assert params.__annotations__.keys() - headers <= {*model.model_fields, *MESSAGING, *REFUSED}


@pytest.mark.parametrize(
    ("name", "value", "has_effect"),
    [
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, False),
        ("diagnostics", {"previous_message_id": None}, False),
        ("speed", "standard", False),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]}, True),
        ("context_management", ["clear_all"], True),
        ("speed", "fast", True),
    ],
)
def test_what_would_change_a_message_is_refused_and_what_has_no_effect_is_taken(name, value, has_effect):
    message = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], name: value}
    if has_effect:
        assert name in refused(parse, AnthropicMessagesRequest, message, MESSAGING).message
    else:
        assert name not in parse(AnthropicMessagesRequest, message, MESSAGING).model_fields_set


def test_null_means_absent_at_any_depth_but_not_in_what_clients_define():
    block = {"type": "tool_use", "input": {"a": None}}
    tool = {"name": "f", "parameters": {"enum": [None], "default": None}}
    body: dict[str, Any] = {
        "n": None,
        "messages": [{"content": [{**block, "id": None}], "annotations": [{"status": None}]}],
        "input": [{"id": None, "content": [None]}],
        "tools": [{**tool, "strict": None}],
        "sampling_params": {"seed": None, "extra_args": {"a": None}},
    }
    drop_nulls(body)
    assert body == {
        "messages": [{"content": [block], "annotations": [{}]}],
        "input": [{"content": [None]}],
        "tools": [tool],
        "sampling_params": {"extra_args": {"a": None}},
    }
    # So is what asks for nothing.
    body = {"suffix": "", "mcp_servers": [], "prompt": "", "tools": None}
    assert check_fields(CompletionRequest, body, NO_EFFECT) == {"prompt": ""}
    assert refused(check_fields, CompletionRequest, {"mcp_servers": [1]}, NO_EFFECT).param == "mcp_servers"
