"""Which alternatives an answer shows, and the log probabilities of a prompt."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob, append_logprobs_for_next_position

from backend.engine.front.client import FleetClient
from backend.engine.front.logprobs import TokensLogprobs, likeliest, repeat_prompt_logprobs
from backend.engine.front.serving import ServingResponses
from tests.support.properties import examples

VALUES = st.lists(st.integers(-50, -1), min_size=4, max_size=12, unique=True)


def position(values: list[int], drawn: int, k: int) -> dict[int, Logprob]:
    """What vLLM's processor makes of a position where `values` are the log probabilities of the tokens 0, 1, ..."""
    order = sorted(range(len(values)), key=lambda token: -values[token])
    ids = [drawn, *order[:k]]
    found: list[Any] = []
    append_logprobs_for_next_position(found, ids, [float(values[i]) for i in ids], [None] * (k + 1), order.index(drawn) + 1, k)
    return found[0]


@given(VALUES, st.data())
@examples(100)
def test_the_likeliest_tokens_are_shown_whichever_was_drawn(values: list[int], data: Any) -> None:
    k = data.draw(st.integers(1, len(values)))
    drawn = data.draw(st.integers(0, len(values) - 1))
    shown = likeliest(position(values, drawn, k), k)
    assert list(shown)[:k] == sorted(range(len(values)), key=lambda token: -values[token])[:k]
    assert shown[drawn].logprob == values[drawn]


class Noted:
    """vLLM's token route; returns what it is to show."""

    def _create_tokens_logprobs(self, **given: Any) -> dict[str, Any]:
        return given


class NotedTokens(TokensLogprobs, Noted):
    """Ours over it."""


@pytest.mark.parametrize("limit", [{"num_output_top_logprobs": 2}, {"top_limit": 2}, {}], ids=["0.32", "0.33, parsed", "0.33"])
def test_the_token_route_shows_the_likeliest_however_vllm_says_how_many(limit: dict[str, int]) -> None:
    positions = [position([-1, -2, -3, -4], 3, 2), None]
    shown = NotedTokens()._create_tokens_logprobs(token_ids=[3, 0], top_logprobs=positions, **limit)
    (first, second), others = shown.pop("top_logprobs"), {"token_ids": [3, 0], **limit}
    assert (list(first), second, shown) == ([0, 1, 3], None, others)


async def test_a_prompt_keeps_its_log_probabilities_when_results_are_joined() -> None:
    async def results() -> Any:
        # The third is a later result of one choice, to which the first one of another was joined.
        for prompt, logprobs in ((0, ["a"]), (1, ["b"]), (0, []), (1, None)):
            yield prompt, SimpleNamespace(prompt_logprobs=logprobs)

    found = [(prompt, result.prompt_logprobs) async for prompt, result in repeat_prompt_logprobs(results())]
    assert found == [(0, ["a"]), (1, ["b"]), (0, ["a"]), (1, ["b"])]


@pytest.mark.parametrize("asked", [-1, 500])
async def test_all_of_the_vocabulary_counts_as_many(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.engine.front.client.MAX_PROMPT_LOGPROBS", 1000)
    client: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 500))
    params = SamplingParams(prompt_logprobs=asked, max_tokens=1)
    with pytest.raises(VLLMValidationError, match="more than 1000 log probabilities"):
        await FleetClient.add_request(client, "a", {"prompt_token_ids": [1, 2]}, params)


class Thinking:
    """A parser to which `<` begins a thought and `>` ends it; both are no text."""

    is_thinking = False

    def read(self, output: Any, *others: Any) -> list[Any]:
        self.is_thinking = output.text == "<" or (self.is_thinking and output.text != ">")
        self.is_silent = output.text in ("<", ">", "")
        return [output]

    def parse_delta(self, delta_text: str, **others: Any) -> DeltaMessage | None:
        if self.is_silent:
            return None
        return DeltaMessage(reasoning=delta_text) if self.is_thinking else DeltaMessage(content=delta_text)


@pytest.mark.parametrize(
    ("parser", "texts", "shown"),
    [
        (None, ["a", "", "", "b", "c", ""], ["a", "b", "c"]),
        (Thinking(), ["<", "x", "", "y", ">", "", "b", "", "c"], ["b", "c"]),
    ],
)
async def test_a_streamed_response_shows_tokens_without_text_with_the_next_text(
    parser: Any, texts: list[str], shown: list[str]
) -> None:
    context = SimpleContext.__new__(SimpleContext)
    context.response_parser, context.last_output = parser, None

    async def contexts() -> Any:
        for token, text in enumerate(texts):
            found = [{token: Logprob(-1.0, 1, f"{token}")}]
            output = SimpleNamespace(text=text, token_ids=[token], logprobs=found, finish_reason=None)
            context.last_output = cast("Any", SimpleNamespace(outputs=[output], prompt_token_ids=[]))
            yield context

    request = SimpleNamespace(
        tools=[],
        include_reasoning=True,
        is_include_output_logprobs=lambda: True,
        top_logprobs=0,
        request_id="r",
        parallel_tool_calls=True,
    )
    service = ServingResponses.__new__(ServingResponses)
    service.return_tokens_as_token_ids = False
    made = service._process_simple_streaming_events(request, None, contexts(), context, "m", None, None, 0, lambda event: event)
    deltas = [each async for each in made if each.type == "response.output_text.delta"]
    assert [each.delta for each in deltas] == shown
    told = [int(one.token) for each in deltas for one in each.logprobs]
    # Without those of a thought, and of what is behind the last text.
    first = texts.index(">") if ">" in texts else 0
    assert told == list(range(first, max(token for token, text in enumerate(texts) if text) + 1))
