"""What the gateway relies on inside vLLM 0.32 and 0.33.  When a test fails, read `backend/engine/front/client.py` first."""

import ast
import inspect
import re
import textwrap

import pytest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import GenerationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState
from vllm.v1.structured_output import StructuredOutputManager

from backend.engine.front.client import FleetClient
from backend.engine.front.messages import Messages
from backend.engine.front.serving import ServingChat, ServingCompletion, ServingResponses, ServingTokensWithLogprobs
from backend.engine.front.stream import PlainStream
from gateway.fleet.core import FleetCore

USED_BY_REQUESTS = (
    "__init__", "add_request", "_add_request", "generate", "abort", "_run_output_handler", "check_admission",
    "get_supported_tasks", "is_running", "errored", "is_tracing_enabled", "add_lora",
)  # fmt: skip


def read_of(function, *owners: str) -> set[str]:
    """The attributes that it reads of what has one of these names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners}


def source_of(name: str):
    member = inspect.getattr_static(AsyncLLM, name)
    return member.fget if isinstance(member, property) else member


def test_every_attribute_that_async_llm_reads_is_one_we_set():
    ours = read_of(FleetClient.__init__, "self") | {"_supported_tasks", "_logger_ref"}
    for name in USED_BY_REQUESTS[1:]:
        read = {each for each in read_of(source_of(name), "self") if not hasattr(AsyncLLM, each)}
        assert read <= ours, f"AsyncLLM.{name} reads {read - ours}"


def test_every_call_on_the_engine_core_is_one_we_answer():
    for name in USED_BY_REQUESTS[1:]:
        for called in read_of(source_of(name), "self.engine_core", "engine_core") - {"resources"}:
            assert called in vars(FleetCore), f"AsyncLLM.{name} calls engine_core.{called}"


def test_the_engine_core_client_still_has_the_methods_we_override():
    for name in ("get_output_async", "add_request_async", "abort_requests_async", "get_supported_tasks_async", "shutdown"):
        theirs, ours = getattr(EngineCoreClient, name), getattr(FleetCore, name)
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)


def test_signatures_we_call():
    def parameters(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(AsyncLLM._add_request) == ["self", "request", "prompt", "parent_req", "index", "queue"]
    assert parameters(OutputProcessor.abort_requests) == ["self", "request_ids", "internal"]
    assert {"log_stats", "stream_interval", "tracing_enabled", "admission_stats"} <= set(parameters(OutputProcessor))
    assert parameters(OpenAIServingChat.create_chat_completion) == ["self", "request", "raw_request"]
    assert parameters(OpenAIServingCompletion.create_completion) == ["self", "request", "raw_request"]


def test_an_exception_in_a_collector_is_not_overwritten():
    source = inspect.getsource(RequestOutputCollector.put)
    assert "self.output is None or isinstance(output, Exception)" in source
    assert {"queue", "parent_req"} <= read_of(RequestState.__init__, "self")


def test_where_plain_streams_stand_between():
    """`backend/engine/front/stream.py` takes the places of a sequence's queue and of what makes its outputs."""
    for function in (OutputProcessor.process_outputs, OutputProcessor.abort_requests):
        source = inspect.getsource(function)
        assert "req_state.make_request_output(" in source
        assert "req_state.queue.put(" in source
    given = list(inspect.signature(RequestState.make_request_output).parameters)
    assert given[1:5] == list(inspect.signature(PlainStream.take).parameters)[1:5]
    assert inspect.isasyncgenfunction(AsyncLLM.generate), "it must not submit before it is asked for an output"
    for ours, theirs in ((ServingChat, OpenAIServingChat), (ServingCompletion, OpenAIServingCompletion)):
        for name in ("chat_completion_stream_generator", "completion_stream_generator"):
            if name in vars(ours):
                named = [each for each in inspect.signature(getattr(ours, name)).parameters if each not in ("args", "kwargs")]
                given = list(inspect.signature(getattr(theirs, name)).parameters)
                assert given[: len(named) - 1] == named[:-1]
                assert named[-1] in given


def test_our_errors_pass_through_generate():
    assert re.search(r"except \(VLLMClientError, GracefulHTTPError(, GenerationError)?\)", inspect.getsource(AsyncLLM.generate))


@pytest.mark.parametrize("kind", [ServingChat, ServingCompletion, ServingResponses, ServingTokensWithLogprobs, Messages])
@pytest.mark.parametrize(
    "make", ["create_error_response", "create_streaming_error_response", "_convert_generation_error_to_streaming_response"]
)
def test_an_error_that_vllm_would_put_into_words_is_raised(kind, make):
    serving = kind.__new__(kind)

    def fail():
        try:
            raise GenerationError("boom")
        except GenerationError as error:
            getattr(serving, make)(error)

    with pytest.raises(GenerationError):
        fail()
    assert serving.create_error_response("no such model").error.message == "no such model"


def test_structured_outputs_are_validated_and_compiled_as_we_expect():
    assert "if structured_outputs_config is None" in inspect.getsource(SamplingParams._validate_structured_outputs)
    assert "structured_outputs_config" in read_of(InputProcessor._validate_params, "self")
    ours = {"structured_output_request", "sampling_params", "request_id"}
    for method in (StructuredOutputManager.grammar_init, StructuredOutputManager._create_grammar):
        assert read_of(method, "request") <= ours


async def test_what_a_chat_raises_is_what_its_messages_raise():
    async def chat():
        raise GenerationError("boom")
        yield

    with pytest.raises(GenerationError):
        async for _ in Messages.__new__(Messages).message_stream_converter(chat()):
            pass
