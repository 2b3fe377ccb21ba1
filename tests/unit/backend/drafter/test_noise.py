"""Drafting with the shared noise: drafts follow the verifier's rule on the head's distribution, and end when unlikely."""

import math
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.proposer import Premise, Sampling, Until
from backend.speculation.chances import CLIP, chance, chances
from backend.wire.drafting import Outcome
from tests.support.drafter_heads import Reference, Session, TinyHead, begun, make_proposer

HEADS = {
    "plain": TinyHead(),
    "reduced vocabulary": TinyHead(draft_vocab=23),
    "norm output": TinyHead(norm_output=True),
    "eagle 1, two layers": TinyHead(kind="eagle", layers=2),
}
CLOSE_CALL = 1e-3
SEED = 2**64 - 12345


def signs_of(book: Reference, request: Session, before: list[int], tokens: list[int]) -> list[float]:
    """Value and lead of each of `tokens` behind `before`, from the equations."""
    book.draft(request.tokens, request.seen, 0, [*before, *tokens])
    signs = []
    for values, token in zip(book.values[len(before) :], tokens, strict=True):
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
            assert drafted.signs == pytest.approx(signs_of(book, request, [], drafted.tokens), abs=1e-3, rel=1e-3)
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


# Outcomes.


def logsum(values: list[float]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))


def scored(
    book: Reference, request: Session, verifying: list[int], size: int, judge: Sequence[float] | None
) -> dict[tuple[int, int], float]:
    """The logarithm of every candidate's chance, from the formula: `size` candidates at each stop, the verified one apart."""
    book.draft(request.tokens, request.seen, 1, verifying)
    found: dict[tuple[int, int], float] = {}
    before = 0.0
    for stop, values in enumerate(book.values):
        last = stop == len(verifying)
        token = None if last else verifying[stop]
        top = sorted(values, key=lambda t: -values[t])[:size]
        rest = [t for t in top if t != token]
        value = -30.0 if token is None else values.get(token, -30.0)
        total = logsum([values[t] for t in rest])
        ended = 0.0
        if judge is not None and token is not None:
            one = chance(judge, stop, value, value - max(values[t] for t in values if t != token))
            accepted, ended = math.log(one), math.log(1 - one)
        elif not last:
            total = logsum([total, value])
            accepted = value - total
        for t in rest:
            found[stop, t] = before + ended + values[t] - total
        if not last:
            before += accepted
    return found


@pytest.mark.parametrize("chance_weights", [(), (GREEDY_JUDGE, SAMPLED_JUDGE)], ids=["unjudged", "judged"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_outcomes_of_a_sampled_request_are_the_likeliest_given_its_noise(
    tmp_path: Path, head: TinyHead, chance_weights: Sequence[Sequence[float]]
) -> None:
    proposer = make_proposer(tmp_path, head)
    sampling = Sampling.of(SEED, 1.0)
    requests = [begun(proposer, key, length, sampling) for key, length in enumerate((9, 3, 30))]
    verifying = [requests[0].draft().tokens, [60, 3], requests[2].draft(3).tokens]
    until = Until(4, 0.0, chance_weights)
    premises = [Premise(r.key, len(r.tokens), until, v, 6) for r, v in zip(requests, verifying, strict=True)]
    book, clear = Reference(head, SEED, 1.0), 0
    for request, tokens, outcomes in zip(requests, verifying, proposer.draft_outcomes(premises), strict=True):
        by_formula = scored(book, request, tokens, 7, chance_weights[1] if chance_weights else None)
        best = sorted(by_formula.values(), reverse=True)
        assert len(outcomes) == 6
        for rank, outcome in enumerate(outcomes):
            assert by_formula[outcome.accepted, outcome.token] == pytest.approx(best[rank], abs=1e-3, rel=1e-3)
            clear += is_by_the_book(book, request, tokens, outcome)
        if not chance_weights:
            # The token that this noise makes of the head's distribution: the bonus if all are accepted.
            book.draft(request.tokens, request.seen, 1, tokens)
            last = max(book.values[-1], key=book.values[-1].__getitem__)
            assert tokens == [60, 3] or (len(tokens), last) in {(o.accepted, o.token) for o in outcomes}
    assert clear > 10


def is_by_the_book(book: Reference, request: Session, verifying: list[int], outcome: Outcome) -> bool:
    before = [*verifying[: outcome.accepted], outcome.token]
    expected = book.draft(request.tokens, request.seen, 4, before)
    if book.margin <= CLOSE_CALL:
        return False
    assert outcome.tokens == expected
    signs = signs_of(book, request, before, expected)
    # EAGLE-1's weights here make logits of thousands.
    assert outcome.signs == pytest.approx(signs, abs=1e-3 + 1e-6 * max(map(abs, signs)), rel=1e-3)
    return True


def test_greedy_outcomes_are_judged_too(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 20)
    verifying = request.draft().tokens
    for certain, stops in ((20.0, {4}), (-20.0, {0})):
        chance_weights = [[0.0, 0.0, certain]] * 2
        outcomes = proposer.draft_outcomes([Premise(1, 20, Until(3, 0.0, chance_weights), verifying, 5)])[0]
        assert {o.accepted for o in outcomes} == stops


def test_drafts_of_outcomes_end_early_too(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 20, Sampling.of(SEED, 1.0))
    verifying = request.draft().tokens
    chance_weights, floor = (GREEDY_JUDGE, SAMPLED_JUDGE), 0.5
    whole = proposer.draft_outcomes([Premise(1, 20, Until(5, 0.0, chance_weights), verifying, 8)])[0]
    short = proposer.draft_outcomes([Premise(1, 20, Until(5, floor, chance_weights), verifying, 8)])[0]
    lengths = set()
    for full, cut in zip(whole, short, strict=True):
        alive = [s >= floor for s in survivals(SAMPLED_JUDGE, full.signs)]
        kept = alive.index(False) if False in alive else 5
        assert (cut.accepted, cut.token, cut.tokens) == (full.accepted, full.token, full.tokens[:kept])
        lengths.add(kept)
    assert len(lengths) > 1
