"""Drafting with the shared noise: drafts follow the verifier's rule on the head's distribution, and end when unlikely."""

import math
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.proposer import Sampling, Until
from backend.speculation.chances import CLIP, chance, chances
from tests.support.drafter_heads import Reference, TinyHead, begun, make_proposer

HEADS = {
    "plain": TinyHead(),
    "reduced vocabulary": TinyHead(draft_vocab=23),
    "norm output": TinyHead(norm_output=True),
    "eagle 1, two layers": TinyHead(kind="eagle", layers=2),
}
CLOSE_CALL = 1e-3
SEED = 2**64 - 12345


def signs_of(book: Reference, tokens: list[int]) -> list[float]:
    """Value and lead of each of `tokens`, which the equations have drafted last."""
    signs = []
    for values, token in zip(book.values[-len(tokens) :], tokens, strict=True):
        signs += [values[token], values[token] - max(v for t, v in values.items() if t != token)]
    return signs


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.4])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_target_with_the_heads_distribution_accepts_every_draft(tmp_path: Path, head: TinyHead, temperature: float) -> None:
    proposer = make_proposer(tmp_path, head)
    clear = 0
    for key in range(6):
        seed = SEED - 7919 * key
        request = begun(proposer, key, 9 + key, Sampling.of(seed, temperature))
        drafted, book = request.draft(), Reference(head, seed, temperature)
        expected = book.draft(request.tokens, request.seen, 4)
        if book.margin > CLOSE_CALL:
            assert drafted.tokens == expected
            clear += 1
            assert drafted.signs == pytest.approx(signs_of(book, drafted.tokens), abs=1e-3, rel=1e-3)
    assert clear > 3


def test_a_temperature_that_vllm_takes_for_greedy_is_greedy(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    cool, greedy = (begun(proposer, 1, 10, Sampling.of(SEED, t)) for t in (1e-6, 0.0))
    assert cool.draft() == greedy.draft()


# Early stops.

GREEDY_JUDGE, SAMPLED_JUDGE = [0.5, 0.5, -0.5, 0.2, 0.1], [0.3, 0.4, 0.6]


def survivals(weights: Sequence[float], signs: Sequence[float]) -> list[float]:
    found, survival = [], 1.0
    for one in chances(weights, signs):
        survival *= one
        found.append(survival)
    return found


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.3, 0.6, 0.9, 1.0])
def test_a_draft_ends_before_the_first_token_below_the_floor(tmp_path: Path, floor: float) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    requests = [begun(proposer, key, 10 + key, Sampling.of(SEED, float(key % 2))) for key in range(8)]
    whole = proposer.draft([r.ask(6) for r in requests])
    until = Until(6, floor, [GREEDY_JUDGE, SAMPLED_JUDGE])
    cut = proposer.draft([r.ask(until) for r in requests])
    for key, (full, short) in enumerate(zip(whole, cut, strict=True)):
        alive = [s >= floor for s in survivals(SAMPLED_JUDGE if key % 2 else GREEDY_JUDGE, full.signs)]
        kept = alive.index(False) if False in alive else 6
        assert short.tokens == full.tokens[:kept]
        assert short.signs == pytest.approx(full.signs[: 2 * kept])
        assert list(short.first) == full.tokens[:1], "also where it is not sent"


def test_nobody_computes_what_no_draft_needs(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    requests = [begun(proposer, key, 10 + key) for key in range(3)]
    hopeless = [[0.0, 0.0, 2.0, -20.0]] * 2

    def cost(*untils: Until) -> tuple[list[int], int]:
        asks = [r.ask(u) for r, u in zip(requests, untils, strict=False)]
        with mock.patch.object(proposer._head, "forward", wraps=proposer._head.forward) as forward:
            return [len(drafted.tokens) for drafted in proposer.draft(asks)], forward.call_count

    assert cost(*[Until(8, 0.5, hopeless)] * 3) == ([1, 1, 1], 1)
    assert cost(*[Until(8, 1.0, hopeless)] * 3) == ([0, 0, 0], 0)
    # One that nobody judges, and one that ends by its own k, go on as far as they would.
    assert cost(Until(8, 0.5, hopeless), Until(4), Until(3, 0.0, hopeless)) == ([1, 4, 3], 3)
    assert cost(Until(8), Until(2, 0.001, hopeless), Until(8, 0.5, hopeless)) == ([8, 1, 1], 7)


@given(
    st.lists(st.floats(-3, 3), min_size=3, max_size=6),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=12),
)
def test_a_chance_is_one_whatever_the_signs(weights: list[float], signs: list[float]) -> None:
    found = chances(weights, signs)
    assert len(found) == len(signs) // 2
    assert all(0 <= one <= 1 for one in found)
    for place, one in enumerate(found):
        value, lead = (max(-CLIP, min(CLIP, -CLIP if math.isnan(s) else s)) for s in signs[2 * place : 2 * place + 2])
        at = weights[0] * value + weights[1] * lead + weights[2:][min(place, len(weights) - 3)]
        assert one == pytest.approx(1 / (1 + math.exp(-at)))
    assert chance([1e9, 0.0, 0.0], 0, 8.0, 0.0) == 1.0
    assert chance([1e9, 0.0, 0.0], 0, -8.0, 0.0) < 1e-9
