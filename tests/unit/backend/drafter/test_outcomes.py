"""Enumerated outcomes against brute force: each equals what drafting by the book on the same assumptions gives."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from backend.drafter.decoding import DecodeBatch
from backend.drafter.outcomes import UNJUDGED
from backend.drafter.proposer import MAX_OUTCOMES, Premise, Sampling, Until
from backend.speculation.chances import chances
from backend.wire.drafting import Outcome
from tests.support.attention_cases import attend_one_by_one
from tests.support.drafter_heads import Reference, TinyHead, make_proposer
from tests.support.drafter_sessions import Session, begun
from tests.unit.backend.drafter.test_eagle import CLOSE_CALL, GREEDY_JUDGE, HEADS, SAMPLED_JUDGE, SEED, signs_of

KINDS_OF_HEADS = "plain", "reduced vocabulary", "two layers", "norm output", "qwen3", "wide heads", "eagle 1, two layers"
# Temperature, whether the verifier has sent weights, and whether it decodes as on a GPU.
KINDS = {
    "greedy": (0.0, False, False),
    "greedy, judged, as on a GPU": (0.0, True, True),
    "sampled, as on a GPU": (1.0, False, True),
    "sampled, judged": (1.0, True, False),
}


def scored(
    book: Reference, request: Session, verifying: list[int], size: int, judge: Sequence[float]
) -> dict[tuple[int, int], float]:
    """The logarithm of every candidate's chance, from the formula: `size` candidates at each stop, the verified one apart."""
    book.draft(request.tokens, request.seen, 1, verifying)
    found: dict[tuple[int, int], float] = {}
    before = 0.0
    for stop, values in enumerate(book.values):
        token = verifying[stop] if stop < len(verifying) else None
        top = sorted(values, key=lambda t: -values[t])[:size]
        rest = [t for t in top if t != token]
        value = -30.0 if token is None else values.get(token, -30.0)
        total, accepted, ended = np.logaddexp.reduce([values[t] for t in rest]), 0.0, 0.0
        if token is not None:
            signs = [value, value - max(values[t] for t in values if t != token)]
            (one,) = chances([*judge[:2], *(judge[2 + stop :] or judge[-1:])], signs)
            accepted, ended = math.log(one), math.log(1 - one)
        for t in rest:
            found[stop, t] = before + ended + values[t] - total
        before += accepted
    return found


def check(
    book: Reference,
    request: Session,
    verifying: list[int],
    outcomes: list[Outcome],
    wanted: int,
    size: int = 61,
    judge: Sequence[float] = UNJUDGED,
) -> int:
    """Asserts that these are the likeliest, each drafted for by the book; returns how many were no close calls."""
    by_formula = scored(book, request, verifying, size, judge)
    assert len({(o.accepted, o.token) for o in outcomes}) == len(outcomes) == min(wanted, len(by_formula))
    best = sorted(by_formula.values(), reverse=True)
    for rank, outcome in enumerate(outcomes):
        assert by_formula[outcome.accepted, outcome.token] == pytest.approx(best[rank], abs=1e-3, rel=1e-3)
    clear = 0
    for outcome in outcomes:
        expected = book.draft(request.tokens, request.seen, 4, [*verifying[: outcome.accepted], outcome.token])
        if book.margin > CLOSE_CALL:
            assert outcome.tokens == expected
            signs = signs_of(book, expected)
            # EAGLE-1's weights here make logits of thousands.
            assert outcome.signs == pytest.approx(signs, abs=1e-3 + 1e-6 * max(map(abs, signs)), rel=1e-3)
            clear += 1
    return clear


@pytest.mark.parametrize(("temperature", "is_judged", "as_on_gpu"), KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("name", KINDS_OF_HEADS)
def test_outcomes_are_the_likeliest_and_each_is_drafted_by_the_book(
    tmp_path: Path, name: str, temperature: float, is_judged: bool, as_on_gpu: bool
) -> None:
    head = HEADS[name]
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head, SEED, temperature)
    # One token is outside a reduced vocabulary, one draft is shorter than the others.
    requests = [begun(proposer, key, length, Sampling.of(SEED, temperature)) for key, length in enumerate((9, 2, 40))]
    verifying = [requests[0].draft().tokens, [60, 3], requests[2].draft(3).tokens]
    wanted = [8, 5, 12]
    until = Until(4, 0.0, (GREEDY_JUDGE, SAMPLED_JUDGE) if is_judged else ())
    judge = (SAMPLED_JUDGE if temperature else GREEDY_JUDGE) if is_judged else UNJUDGED
    premises = [Premise(r.key, len(r.tokens), until, v, n) for r, v, n in zip(requests, verifying, wanted, strict=True)]
    clear = 0
    for request, tokens, outcomes, count in zip(requests, verifying, proposer.draft_outcomes(premises), wanted, strict=True):
        clear += check(book, request, tokens, outcomes, count, max(wanted) + 1, judge)
    assert clear > 12


def forced() -> Any:
    """Notes passes over single tokens under verification."""
    step = DecodeBatch.advance_forced
    return mock.patch.object(DecodeBatch, "advance_forced", autospec=True, side_effect=step, __name__="advance_forced")


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("cut", [4, 3, 1], ids=["whole", "but the last", "first"])
@pytest.mark.parametrize("head", [HEADS["two layers"], HEADS["norm output"]], ids=["two layers", "norm output"])
def test_what_drafting_has_computed_is_not_computed_again(tmp_path: Path, head: TinyHead, cut: int, as_on_gpu: bool) -> None:
    """On a GPU the next draft, of another request, is made in the same tensors."""
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    requests = [begun(proposer, key, length) for key, length in enumerate((9, 30, 40))]
    for is_last in (False, True):
        drafts = [request.draft().tokens for request in requests]
        verifying = [drafts[0][:cut], drafts[1][: max(cut - 1, 1)], drafts[2][:cut]]
        with forced() as steps:
            found = proposer.draft_outcomes([r.premise(v, 6) for r, v in zip(requests, verifying, strict=True)])
        # At first room for branches is made: a sequence that moves leaves its draft's rows behind.  Then one pass over all
        # tokens, on their true features, is as good as one for each.
        assert steps.call_count == (1 if is_last and cut == 4 else 0)
        assert sum(check(book, r, v, o, 6) for r, v, o in zip(requests, verifying, found, strict=True)) > 8


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_a_draft_for_an_outcome_that_came_takes_one_pass_to_enumerate(tmp_path: Path, as_on_gpu: bool) -> None:
    head = TinyHead()
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    requests = [begun(proposer, key, 20 + key) for key in range(3)]
    exact = 0
    for turn in range(4):
        drafts = [request.draft().tokens for request in requests]
        outcomes = proposer.draft_outcomes([r.premise(d, 6) for r, d in zip(requests, drafts, strict=True)])
        came = [own[(i + turn) % 6] for i, own in enumerate(outcomes)]
        for request, draft, outcome in zip(requests, drafts, came, strict=True):
            request.commit([*draft[: outcome.accepted], outcome.token]).draft(0)
        premises = [r.premise(o.tokens[: 4 - turn % 2], 6) for r, o in zip(requests, came, strict=True)]
        with forced() as steps:
            found = proposer.draft_outcomes(premises)
        assert not steps.called
        for request, premise, own in zip(requests, premises, found, strict=True):
            # Up to the second stop all features are true ones.
            for outcome in (each for each in own if each.accepted <= 1):
                assumed = [*premise.verifying[: outcome.accepted], outcome.token]
                if book.draft(request.tokens, request.seen, 4, assumed) == outcome.tokens:
                    exact += 1
                else:
                    assert book.margin < CLOSE_CALL
    assert exact > 20


@pytest.mark.parametrize("beside", ["nobody", "a fresh draft", "a draft for an outcome", "another one"])
def test_the_next_token_alone_is_enumerated_where_nothing_is_verified(tmp_path: Path, beside: str) -> None:
    head = TinyHead()
    proposer, book = make_proposer(tmp_path, head), Reference(head)
    alone, other = begun(proposer, 1, 20), begun(proposer, 2, 25)
    draft = other.draft().tokens
    if beside in ("a draft for an outcome", "another one"):
        outcome = proposer.draft_outcomes([other.premise(draft, 6)])[0][0]
        other.commit([*draft[: outcome.accepted], outcome.token]).draft(0)
        draft = outcome.tokens if beside != "another one" else [(outcome.tokens[0] + 1) % 60, 3, 4]
    premises = [alone.premise([], 6)] + [other.premise(draft, 6)] * (beside != "nobody")
    found = proposer.draft_outcomes(premises)
    assert {outcome.accepted for outcome in found[0]} == {0}
    assert check(book, alone, [], found[0], 6) == 6
    assert all(check(book, other, draft, outcomes, 6) for outcomes in found[1:])


def test_what_cannot_be_enumerated_is_empty(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 20)
    draft = request.draft().tokens
    base_len = len(request.tokens)
    for premise in (
        Premise("ghost", base_len, Until(4), draft, 8),
        Premise(1, base_len + 1, Until(4), draft, 8),
        Premise(1, base_len, Until(0), draft, 8),
        Premise(1, base_len, Until(4), draft, 0),
    ):
        assert proposer.draft_outcomes([premise, request.premise(draft, 3)])[0] == []
    assert proposer.draft_outcomes([]) == []
    proposer.commit(1, base_len + 1, [5], 1)
    assert proposer.draft_outcomes([Premise(1, base_len + 1, Until(4), draft, 8)]) == [[]], "its round was not drafted from"


def test_outcomes_and_positions_have_limits(tmp_path: Path) -> None:
    head = TinyHead(max_position=32)
    proposer = make_proposer(tmp_path, head, cache_tokens=16384)
    request = begun(proposer, 1, 26)
    found = proposer.draft_outcomes([request.premise(request.draft().tokens, 10_000, 70)])[0]
    assert len(found) == MAX_OUTCOMES
    assert all(len(o.tokens) == 32 - 26 - 1 - o.accepted for o in found)


def test_guesses_take_no_room_from_open_requests(tmp_path: Path) -> None:
    head = TinyHead()
    proposer, book = make_proposer(tmp_path, head, cache_tokens=384), Reference(head)
    one, two = begun(proposer, 1, 100), begun(proposer, 2, 100)
    assert proposer.draft_outcomes([one.premise(one.draft().tokens, 16)]) == [[]]
    assert proposer.usage().evictions == 0
    for request in (one, two):
        expected = book.draft(request.tokens, request.seen, 4)
        assert request.draft().tokens == expected
    proposer.close(2)
    check(book, one, one.draft().tokens, proposer.draft_outcomes([one.premise(one.draft().tokens, 16)])[0], 16)
    assert proposer.usage().evictions == 1


def test_half_precision_enumerates_within_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.drafter.head.attend", attend_one_by_one)
    head = TinyHead(layers=2, draft_vocab=23)
    proposer = make_proposer(tmp_path, head, dtype=torch.bfloat16)
    request = begun(proposer, 1, 20)
    found = proposer.draft_outcomes([request.premise(request.draft().tokens, 8)])[0]
    assert len(found) == 8
    assert all(0 <= token < head.vocab for o in found for token in (o.token, *o.tokens))
