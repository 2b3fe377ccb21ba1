"""vLLM's front half: which sampling parameters a rollout's takes, and which prompts a gateway's tokenizes in the event loop."""

import asyncio
from typing import Any
from unittest import mock

import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import ChatParams, TokenizeParams, renderer_from_config
from vllm.sampling_params import RequestOutputKind

from backend.config import Settings
from backend.engine.front.client import SHORT, short_prompts_at_once
from backend.engine.front.config import build_vllm_config
from backend.engine.front.offline import OfflineProcessor, response_row
from backend.models.demo import TARGET_DIR
from tests.support.processes import demo_models

PROMPT = [0, 5, 6]


@pytest.fixture(scope="module")
def front() -> OfflineProcessor:
    return OfflineProcessor(Settings(), str(TARGET_DIR))


def test_parameters_come_as_json_has_them(front: OfflineProcessor) -> None:
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 4, "min_tokens": 2, "max_tokens": 9, "logprobs": 3,
        "logit_bias": {"5": -1}, "stop_token_ids": [7], "stop": "\n", "bad_words": ["import"], "presence_penalty": 1,
        "allowed_token_ids": [1, 2, 7], "structured_outputs": {"choice": ["a", "b"]}, "include_stop_str_in_output": True,
        "repetition_detection": {"max_pattern_size": 4, "min_count": 3}, "extra_args": {"mine": 1}, "prompt_logprobs": 1,
    }  # fmt: skip
    params = front.params(PROMPT, given)
    assert (params.top_k, params.min_tokens, params.max_tokens, params.seed, params.logprobs) == (5, 2, 9, 4, 3)
    assert (params.logit_bias, params.stop, params.extra_args) == ({5: -1.0}, ["\n"], {"mine": 1})
    assert params.bad_words_token_ids
    assert params.repetition_detection.min_count == 3
    assert '"a" | "b"' in params.structured_outputs.grammar
    assert params.structured_outputs._backend, "a verifier compiles with the backend that was chosen here"
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.eos_token_id is not None
    assert front.params(PROMPT, {"ignore_eos": True}).eos_token_id is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"topp": 1}, "'topp' is none of allowed_token_ids, bad_words, "),
        ({"top_p": 2}, "top_p must be in"),
        ({"top_k": "x"}, r"Expected `int`, got `str` - at `\$.top_k`"),
        ({"temperature": float("nan")}, "not JSON compliant"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens must be less"),
        ({"logit_bias": {"99999": 1}}, r"\[99999\] in logit_bias"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs: "),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs: "),
        ({"structured_outputs": {}}, "structured outputs constraint"),
        ({"extra_args": {"outrider_fixed_response": [1]}}, "extra_args: names that begin with outrider_"),
    ],
)
def test_a_wrong_parameter_is_named(front: OfflineProcessor, given: dict[str, Any], complaint: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=complaint):
            front.params(PROMPT, given)


def test_native_drafting_has_its_own_limits() -> None:
    """vLLM's rejection sampler supports less."""
    front = OfflineProcessor(Settings(mode="native"), str(TARGET_DIR))
    with pytest.raises(ValueError, match="min_p"):
        front.params(PROMPT, {"min_p": 0.5})


def test_the_first_token_of_a_prompt_has_no_log_probabilities() -> None:
    prompt = FlatLogprobs()
    for place in (None, {5: Logprob(-0.5, 1)}):
        prompt.append(place)
    output = CompletionOutput(0, "", [7], None, None, finish_reason="length")
    row = response_row(RequestOutput("1", None, [4, 5], prompt, [output], True))
    assert row["prompt_logprobs"] == [None, [{"token_id": 5, "logprob": -0.5, "rank": 1}]]


@pytest.fixture(scope="module")
def renderer():
    made = renderer_from_config(build_vllm_config(Settings(), demo_models().target_dir))
    yield made
    made.shutdown()


def tokens(renderer: Any, content: str, template: str | None = None, **arguments: Any) -> list[int]:
    async def render() -> list[int]:
        messages: list[Any] = [{"role": "user", "content": content}]
        params = ChatParams(chat_template=template, chat_template_kwargs={"tokenize": False} | arguments)
        _, prompt = await renderer.render_messages_async(messages, params)
        (made,) = await renderer.tokenize_prompts_async([prompt], TokenizeParams(max_total_tokens=None))
        found: list[int] = made["prompt_token_ids"]
        return found

    return asyncio.run(render())


def test_short_prompts_take_no_thread_and_long_ones_do(renderer: Any) -> None:
    short, long = "def f(x):", "x" * (SHORT + 1)
    before = [tokens(renderer, each) for each in (short, long)]
    short_prompts_at_once(renderer)
    with mock.patch.object(renderer._executor, "submit", wraps=renderer._executor.submit) as submit:
        assert tokens(renderer, short) == before[0]
        submit.assert_not_called()
        assert tokens(renderer, long) == before[1]
        assert submit.call_count == 2
        tokens(renderer, short, documents=[{"title": "a", "text": "b"}])
        assert submit.call_count == 3, "a list that came with the request went through the template in the event loop"


def test_an_error_of_a_template_reaches_who_awaits_it(renderer: Any) -> None:
    short_prompts_at_once(renderer)
    with pytest.raises(Exception, match="no"):
        tokens(renderer, "x", "{{ raise_exception('no') }}")
