"""What clients are told of errors, also where vLLM or pydantic would speak of their own affairs."""

import inspect

import pydantic
import pytest
import vllm.exceptions
from starlette.exceptions import HTTPException
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from gateway.http import errors
from gateway.http.sse import CHAT
from gateway.routes.models import _checked_answer

MESSAGE = ("something",)
VLLM_ERRORS = {
    "VLLMError": (MESSAGE, errors.InternalError),
    "VLLMClientError": (MESSAGE, errors.BadRequest),
    "VLLMServerError": (MESSAGE, errors.InternalError),
    "VLLMValidationError": (MESSAGE, errors.BadRequest),
    "VLLMNotFoundError": (MESSAGE, errors.ModelNotFound),
    "LoRAAdapterNotFoundError": (("name", "path"), errors.ModelNotFound),
    "VLLMUnprocessableEntityError": (MESSAGE, errors.BadRequest),
    "GenerationError": (MESSAGE, errors.InternalError),
    "RetryableRequestError": (MESSAGE, errors.Unavailable),
    "GracefulHTTPError": (("busy", 503), errors.Unavailable),
    "QueueOverflowError": ((), errors.Unavailable),
    "MaxQueuedTokensError": ((), errors.Unavailable),
    "ProfilerAlreadyActiveError": ((), errors.Unavailable),
}


def test_every_exception_of_vllm_is_mapped():
    found = {
        name
        for name, kind in inspect.getmembers(vllm.exceptions, inspect.isclass)
        if issubclass(kind, vllm.exceptions.VLLMError)
    }
    # New in vLLM 0.33, and a `VLLMClientError`.
    assert found - {"ChatTemplateResolutionError"} == VLLM_ERRORS.keys()
    for name, (arguments, expected) in VLLM_ERRORS.items():
        assert type(errors.translate(getattr(vllm.exceptions, name)(*arguments))) is expected, name


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (EngineDeadError(), errors.InternalError, "internal_error"),
        (HTTPException(400, "no"), errors.BadRequest, None),
        (HTTPException(500), errors.InternalError, "internal_error"),
        (ValueError("wrong"), errors.BadRequest, None),
        (errors.VerifierLost(), errors.VerifierLost, "verifier_lost"),
    ],
)
def test_translation(error, expected, code):
    ours = errors.translate(error)
    assert type(ours) is expected
    assert ours.code == code


def every_error() -> list[errors.ApiError]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ApiError)]
    return [kind() if issubclass(kind, errors.InternalError | errors.Unavailable) else kind("message") for kind in kinds]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_bodies_have_the_four_fields_and_no_integer_code(error):
    body = error.body()["error"]
    assert list(body) == ["message", "type", "param", "code"]
    assert body["message"]
    assert body["code"] is None or isinstance(body["code"], str)
    assert CHAT.failed(error).startswith(b'data: {"error":')
    assert CHAT.failed(error).endswith(b"\n\n")
    assert list(error.anthropic_body()) == ["type", "error"]
    if error.status in (429, 503):
        assert int(error.headers()["retry-after"]) >= 1
    assert type(error).__name__ in (errors.__doc__ or ""), "the tree is complete"


@pytest.mark.parametrize(
    "message",
    [
        "cannot read /home/someone/models/target/config.json",
        "/elsewhere/models/target is not a multimodal model",
        "see ~/models/target and (/data/x)",
        "cannot connect to ipc:///run/outrider/verifier-0",
        "refused by 10.1.2.3:5555",
        "<object at 0x7f00deadbeef>",
        'Traceback\n  File "/srv/app/x.py", line 3, in f\n    boom()',
    ],
)
def test_messages_are_cleaned_and_what_is_no_path_stays(message):
    cleaned = errors.clean(message)
    for leak in ("/home", "/srv", "/models", "/data", "ipc://", "10.1.2.3", "0x7f", "line 3"):
        assert leak not in cleaned
    stays = "prompt and/or messages, 1/2, n/a; see https://example.org/docs/x"
    assert errors.clean(stays) == stays


def refusal(code, message, param=None):
    with pytest.raises(errors.ApiError) as caught:
        errors.checked(ErrorResponse(error=ErrorInfo(message=message, type="", code=code, param=param)))
    return caught.value


def test_vllm_error_responses_become_ours_without_values_of_fields_or_paths():
    assert isinstance(refusal(404, "no such model"), errors.ModelNotFound)
    assert isinstance(refusal(500, "boom"), errors.InternalError)
    assert refusal(400, "bad", "n").param == "n"
    error = vllm.exceptions.VLLMValidationError("too long", parameter="prompt", value="my secret prompt")
    ours = errors.translate(error)
    assert (ours.message, ours.param) == ("too long", "prompt")
    assert "secret" not in refusal(400, str(error)).message
    message = "LoRA rank 512 is greater than max_lora_rank 16: /srv/x/adapter"
    with pytest.raises(errors.EngineFailed, match="is greater than max_lora_rank") as caught:
        _checked_answer(ErrorResponse(error=ErrorInfo(message=message, type="InternalServerError", code=500)))
    assert "/srv" not in caught.value.message


@pytest.mark.parametrize(
    "words",
    [
        "This model's maximum context length is 8 tokens. However, your prompt contains 9.",
        "Input length (9) exceeds model's maximum context length (8).",
        "The decoder prompt (length 9) is longer than the maximum model length of 8. Make sure that it is smaller.",
        "max_tokens=9 cannot be greater than max_model_len=max_total_tokens=8. Please request fewer output tokens.",
    ],
)
def test_an_overflow_is_said_in_the_words_that_clients_know(words):
    error = errors.translate(ValueError(words))
    assert error.code == "context_length_exceeded"
    assert error.message.startswith("This model's maximum context length is 8 tokens. However, ")
    assert ".." not in error.message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "x"}, "messages.0.role: Field required"),
        ({"role": 5, "content": "x"}, "messages.0.role: Input should be a valid string"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages.0.tool_call_id: Input should be a valid string"),
        (5, "messages.0: Input should be a valid dictionary"),
    ],
)
def test_of_a_message_the_nearest_kind_speaks(message, expected):
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatCompletionRequest.model_validate({"model": "m", "messages": [message]})
    error = errors.translate(caught.value)
    assert (error.param, error.message) == ("messages", expected)


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("presence_penalty must be in [-2, 2], got 5.0.", "presence_penalty", None),
        ("You must pass at least one prompt", "prompt", None),
        ("something else", None, None),
        ('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', "tool_choice",
         '"auto" tool choice requires the setting `gateway.tool_call_parser`'),
        ("You must set `--enable-prompt-embeds` to input `prompt_embeds`.", None,
         "You must set `verifier.engine_args.enable_prompt_embeds` to input `prompt_embeds`."),
        ("Chat template is passed with request, but --trust-request-chat-template is not set. Refused.", "chat_template",
         "Chat templates of requests are not accepted."),
    ],
)  # fmt: skip
def test_messages_name_fields_and_settings_that_exist(message, param, expected):
    error = errors.bad_request(message, None)
    assert (error.param, error.message) == (param, expected or message)
    many = errors.bad_request("Requested prompt logprobs of 100, which is greater than max allowed: 20", None)
    assert "`verifier.engine_args.max_logprobs`" in many.message
