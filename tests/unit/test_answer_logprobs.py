"""Which alternatives an answer shows, and the log probabilities of an echoed prompt."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.logprobs import Logprob, append_logprobs_for_next_position

from backend.engine.front.logprobs import TokensLogprobs, likeliest, with_prompt_logprobs
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


class Route:
    def _create_tokens_logprobs(self, token_ids: Any, top_logprobs: Any, num_output_top_logprobs: int) -> Any:
        return [list(each)[:num_output_top_logprobs] for each in top_logprobs]


class Tokens(TokensLogprobs, Route): ...


def test_the_token_route_shows_them_too() -> None:
    found = position([-3, -1, -2, -9], drawn=3, k=2)
    assert Tokens()._create_tokens_logprobs(token_ids=[3], top_logprobs=[found], num_output_top_logprobs=2) == [[1, 2]]


async def test_a_prompt_keeps_its_log_probabilities_when_results_are_joined() -> None:
    async def results() -> Any:
        # The third is a later result of one choice, to which the first one of another was joined.
        for prompt, logprobs in ((0, ["a"]), (1, ["b"]), (0, []), (1, None)):
            yield prompt, SimpleNamespace(prompt_logprobs=logprobs)

    found = [(prompt, result.prompt_logprobs) async for prompt, result in with_prompt_logprobs(results())]
    assert found == [(0, ["a"]), (1, ["b"]), (0, ["a"]), (1, ["b"])]
