"""What clients read where vLLM or pydantic would speak of their own affairs."""

import pydantic
import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from gateway.http.errors import bad_request, translate


def told(messages):
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatCompletionRequest.model_validate({"model": "m", "messages": messages})
    return translate(caught.value)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, "messages.0.role: Field required"),
        ({"role": "user", "content": 5}, "messages.0.content: Input should be a valid string"),
        ({"role": "assistant", "content": 5}, "messages.0.content: Input should be a valid string"),
        ({"role": 5, "content": "x"}, "messages.0.role: Input should be a valid string"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages.0.tool_call_id: Input should be a valid string"),
        (5, "messages.0: Input should be a valid dictionary"),
    ],
)
def test_of_a_message_the_nearest_kind_speaks(message, said):
    error = told([message])
    assert (error.param, error.message) == ("messages", said)


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ("presence_penalty must be in [-2, 2], got 5.0.", "presence_penalty", "presence_penalty must be in [-2, 2], got 5.0."),
        ("stop cannot contain an empty string.", "stop", "stop cannot contain an empty string."),
        ("You must pass at least one prompt", "prompt", "You must pass at least one prompt"),
        (
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            "tool_choice",
            '"auto" tool choice requires the setting `gateway.tool_call_parser`',
        ),
        (
            "You must set `--enable-prompt-embeds` to input `prompt_embeds`.",
            None,
            "You must set `verifier.engine_args.enable_prompt_embeds` to input `prompt_embeds`.",
        ),
        (
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused.",
            "chat_template",
            "Chat templates of requests are not accepted.",
        ),
        ("something else", None, "something else"),
    ],
)
def test_messages_name_fields_and_settings_that_exist(message, param, said):
    error = bad_request(message, None)
    assert (error.param, error.message) == (param, said)
