"""The EAGLE proposer against the documented equations: batched, ragged, interrupted, resumed, and ended where unlikely."""

import math
from itertools import accumulate
from operator import mul
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend.drafter import eagle
from backend.drafter.draws import Ends
from backend.drafter.proposer import GREEDY, MAX_DRAFT, Drafted, DraftRequest, Premise, Sampling, Until
from backend.speculation.chances import CLIP, chances
from tests.support.drafter_heads import Reference, TinyHead, make_proposer
from tests.support.drafter_sessions import Session, begun, tokens_of
from tests.support.properties import examples

HEADS = {
    "plain": TinyHead(),
    "reduced vocabulary": TinyHead(draft_vocab=23),
    "two layers": TinyHead(layers=2),
    "three layers, biases": TinyHead(layers=3, bias=True),
    "norm before residual": TinyHead(norm_before_residual=True),
    "norm output": TinyHead(norm_output=True),
    "qwen3": TinyHead(model_type="qwen3", layers=2),
    "linear rope": TinyHead(rope={"rope_type": "linear", "factor": 4.0}),
    "wide heads": TinyHead(heads=2, kv_heads=2, head_dim=32),
    "eagle 1": TinyHead(kind="eagle"),
    "eagle 1, two layers": TinyHead(kind="eagle", layers=2),
}
CLOSE_CALL = 1e-3
SEED = 2**64 - 12345


def test_attention_needs_no_plan_per_number_of_rows(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_proposer(tmp_path, TinyHead())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def signs_of(book: Reference, tokens: list[int]) -> list[float]:
    """Value and lead of each of `tokens`, which the equations have drafted last."""
    signs = []
    for values, token in zip(book.values[-len(tokens) :], tokens, strict=True):
        signs += [values[token], values[token] - max(v for t, v in values.items() if t != token)]
    return signs


def check(book: Reference, session: Session, drafted: Drafted, k: int) -> bool:
    """Asserts that a draft and its signs are by the book; returns whether it was no close call."""
    expected = book.draft(session.tokens, session.seen, k)
    assert len(drafted.tokens) == k
    if book.margin <= CLOSE_CALL:
        return False
    assert drafted.tokens == expected
    assert drafted.signs == pytest.approx(signs_of(book, expected), abs=1e-3, rel=1e-3)
    return True


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("long", [3, 1000], ids=["long stretches among others", "row by row"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_ragged_batches_draft_by_the_book(
    tmp_path: Path, head: TinyHead, long: int, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any temperature: a target with the head's distribution would accept every token."""
    monkeypatch.setattr(eagle, "LONG", long)
    proposer, clear = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), 0
    kinds = [(9, SEED, 0.0), (2, SEED - 7919, 0.6), (40, 7, 1.0), (5, SEED, 1.4)]
    books = [Reference(head, seed, temperature) for _, seed, temperature in kinds]
    # vLLM takes a temperature of 1e-6 for greedy, too.
    samplings = [Sampling.of(seed, temperature or 1e-6) for _, seed, temperature in kinds]
    sessions = [Session(proposer, i, tokens_of(i, kinds[i][0]), 0, sampling) for i, sampling in enumerate(samplings)]
    for step in range(4):
        drafts = proposer.draft([session.ask(4) for session in sessions])
        clear += sum(check(*each, 4) for each in zip(books, sessions, drafts, strict=True))
        # Between one and three tokens were decided, rarely those that were drafted: all else is rolled back.
        for i, session in enumerate(sessions):
            session.commit(tokens_of(100 * step + i, 1 + (i + step) % 3))
    assert clear > 10


def test_ten_million_positions_take_no_table_of_rotations_and_drafts_are_the_same(tmp_path: Path) -> None:
    found = []
    for positions in (512, 10_485_760):
        head = TinyHead(layers=2, rope={"rope_type": "linear", "factor": 3.0}, max_position=positions)
        proposer = make_proposer(tmp_path / str(positions), head)
        sizes = [part.numel() * part.element_size() for part in vars(proposer._head).values() if isinstance(part, Tensor)]
        assert sum(sizes) < 16 * 2**20
        drafts = proposer.draft([Session(proposer, "r", tokens_of(1, 400)).ask(6)])
        verifying = drafts[0].tokens[:4]
        found.append((drafts, proposer.draft_outcomes([Premise("r", 400, Until(4), verifying, 8)])))
    assert found[0] == found[1]
    assert len(found[0][1][0]) == 8


def commit_somehow(session: Session, data: st.DataObject) -> None:
    """The next tokens, perhaps behind some that were lost; or the last ones again, which replace those held."""
    again = data.draw(st.sampled_from([0, 0, 0, 1, 4]))
    if 0 < again < len(session.tokens) - 1:
        tokens, session.tokens = session.tokens[-again:], session.tokens[:-again]
        session.seen = {p: f for p, f in session.seen.items() if p < len(session.tokens) - 1}
    else:
        session.tokens += tokens_of(7, data.draw(st.sampled_from([0, 0, 3])))
        tokens = tokens_of(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5)))
    session.commit(tokens)


@examples(40)
@given(st.data())
def test_any_interleaving_of_requests_drafts_by_the_book(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    head = TinyHead(hidden=16, heads=2, kv_heads=1, layers=data.draw(st.integers(1, 2)))
    proposer = make_proposer(tmp_path_factory.mktemp("head"), head, cache_tokens=1024)
    reference, sessions = Reference(head), dict[int, Session]()
    for _ in range(data.draw(st.integers(1, 8))):
        asks: list[DraftRequest] = []
        batch = data.draw(st.lists(st.integers(0, 3), unique=True, min_size=1))
        for key in batch:
            k = data.draw(st.integers(0, 4))
            if key not in sessions or data.draw(st.integers(0, 5)) == 0:
                # A handful of prompts, so that prefixes are often shared.
                prompt = tokens_of(data.draw(st.integers(0, 1)), data.draw(st.integers(2, 70)))
                sessions[key] = Session(proposer, key, prompt)
            else:
                commit_somehow(sessions[key], data)
            asks.append(sessions[key].ask(k))
        for key, ask, drafted in zip(batch, asks, proposer.draft(asks), strict=True):
            check(reference, sessions[key], drafted, ask.until.k)
        for key in data.draw(st.lists(st.sampled_from(batch), unique=True, max_size=1)):
            proposer.close(key)
            del sessions[key]


def test_more_drafts_than_anyone_needs_are_not_made(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead())
    assert len(Session(proposer, 0, tokens_of(1, 9)).draft(10_000).tokens) == MAX_DRAFT


def test_a_full_cache_costs_context_not_answers(tmp_path: Path) -> None:
    head = TinyHead()
    proposer, reference = make_proposer(tmp_path, head, cache_tokens=256), Reference(head)
    sessions = []
    for i in range(6):
        sessions.append(Session(proposer, i, tokens_of(i, 100)))
        check(reference, sessions[i], sessions[i].draft(3), 3)
    assert proposer.usage().evictions > 0
    first = sessions[0]
    first.seen.clear()
    check(reference, first, first.commit([1, 2, 3]).draft(3), 3)
    # A batch that cannot fit at once is answered as far as it does.
    answers = proposer.draft([s.commit(tokens_of(i, 100)).ask(3) for i, s in enumerate(sessions)])
    assert [len(each.tokens) for each in answers].count(3) >= 2


def test_a_request_longer_than_the_cache_goes_on(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead(), cache_tokens=128)
    session = Session(proposer, 0, tokens_of(1, 60))
    session.draft(3)
    for step in range(60):
        assert len(session.commit(tokens_of(step, 3)).draft(3).tokens) == 3


def test_asking_again_without_news_repeats_the_answer(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead())
    drafted = Session(proposer, 0, tokens_of(1, 20)).draft()
    # A preempted request is computed anew: chunks the drafter has already seen carry no rows.
    assert proposer.commit(0, 11, [], 0)
    assert proposer.draft([DraftRequest(0, 11, 0, None)])[0].tokens == []
    assert proposer.commit(0, 20, [], 0)
    assert proposer.draft([DraftRequest(0, 20, 0, None, Until(4))]) == [drafted]


GREEDY_JUDGE, SAMPLED_JUDGE = [0.5, 0.5, -0.5, 0.2, 0.1], [0.3, 0.4, 0.6]
KINDS = GREEDY, Sampling.of(SEED, 1.0), Sampling.of(SEED, 1.0, True)
JUDGES = GREEDY_JUDGE, SAMPLED_JUDGE, [0.0, 0.0, -20.0]
"""For requests of each kind; an independent draft would never go on by these."""


@pytest.mark.parametrize("floor", [0.0, 0.05, 0.3, 0.6, 0.9, 1.0])
def test_drafts_end_before_the_first_token_below_the_floor_but_for_independent_ones(tmp_path: Path, floor: float) -> None:
    def kept(key: int, k: int, signs: list[float]) -> int:
        alive = [s >= floor for s in accumulate(chances(JUDGES[key % 3], signs), mul)]
        return alive.index(False) if False in alive and not KINDS[key % 3].independent else k

    proposer = make_proposer(tmp_path, TinyHead())
    requests = [begun(proposer, key, 10 + key, KINDS[key % 3]) for key in range(9)]
    whole, cut = (proposer.draft([r.ask(Until(6, least, JUDGES)) for r in requests]) for least in (0.0, floor))
    for key, (full, short) in enumerate(zip(whole, cut, strict=True)):
        count = kept(key, 6, full.signs)
        assert len(short.tokens) == count
        if not KINDS[key % 3].independent:
            assert short.tokens == full.tokens[:count]
            assert short.signs == pytest.approx(full.signs[: 2 * count])
            assert list(short.first) == full.tokens[:1], "also where it is not sent"
    premises = [[Premise(r.key, len(r.tokens), Until(5, least, JUDGES), [3, 4], 8) for r in requests] for least in (0.0, floor)]
    for key, (full_ones, cut_ones) in enumerate(zip(*map(proposer.draft_outcomes, premises), strict=True)):
        for one, other in zip(full_ones, cut_ones, strict=True):
            assert (other.accepted, other.token) == (one.accepted, one.token)
            assert len(other.tokens) == kept(key, 5, one.signs)
            assert KINDS[key % 3].independent or other.tokens == one.tokens[: len(other.tokens)]


@examples(100)
@given(st.data())
def test_every_draft_ends_by_its_own_limit_floor_and_weights(data: st.DataObject) -> None:
    """However many tokens are taken at a time, and whether over arrays or one by one."""
    requests, each, steps = (data.draw(st.integers(1, most)) for most in (4, 3, 6))
    weights = st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=6), min_size=len(KINDS), max_size=len(KINDS))
    untils = [Until(steps, data.draw(st.floats(0, 1)), data.draw(st.just([]) | weights)) for _ in range(requests)]
    samplings = data.draw(st.lists(st.sampled_from(KINDS), min_size=requests, max_size=requests))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    limits = random.integers(-1, steps + 1, requests * each)
    signs = random.standard_cauchy((2, steps, requests * each)).astype(np.float32)
    signs[tuple(random.integers(signs.shape))] = random.choice([np.nan, np.inf, -np.inf])
    ends, taken, goes_on = Ends(limits, untils, samplings), 0, True
    with mock.patch("backend.drafter.draws.FEW", data.draw(st.sampled_from([1, 1000]))):
        while goes_on and taken < steps:
            before, taken = taken, data.draw(st.integers(taken + 1, steps))
            goes_on = ends.take(signs[:, before:taken])
    kept = []
    for row, limit in enumerate(limits.tolist()):
        until, sampling = untils[row // each], samplings[row // each]
        judge = until.judge(sampling) if not sampling.independent else None
        survivals = accumulate(chances(judge, signs[:, :, row].T.flatten().tolist()), mul) if judge else ()
        kept.append(min([max(limit, 0), *(place for place, survival in enumerate(survivals) if survival < until.floor)]))
    assert ends.kept.tolist() == kept
    assert goes_on == (max(kept) > taken)


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
    sure, never = chances([1e9, 0.0, 0.0], [8.0, 0.0, -8.0, 0.0])
    assert sure == 1.0
    assert never < 1e-9
