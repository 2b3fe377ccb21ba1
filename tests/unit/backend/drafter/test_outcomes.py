"""Enumerated outcomes against brute force: each equals what drafting by the book on the same assumptions gives."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch

from backend.drafter.decoding import DecodeBatch
from backend.drafter.proposer import MAX_OUTCOMES, Premise, Until
from backend.wire.drafting import Outcome
from tests.support.attention_cases import attend_one_by_one
from tests.support.drafter_heads import Reference, Session, TinyHead, begun, make_proposer, tokens_of

HEADS = {
    "plain": TinyHead(),
    "reduced vocabulary": TinyHead(draft_vocab=23),
    "two layers": TinyHead(layers=2),
    "norm output": TinyHead(norm_output=True),
    "qwen3": TinyHead(model_type="qwen3", layers=2),
    "wide heads": TinyHead(heads=2, kv_heads=2, head_dim=32),
    "eagle 1, two layers": TinyHead(kind="eagle", layers=2),
}
CLOSE_CALL = 1e-3


def likeliest(book: Reference, request: Session, verifying: list[int]) -> dict[tuple[int, int], float]:
    """The log-probability of every outcome, from the formula."""
    book.draft(request.tokens, request.seen, 1, verifying)
    found: dict[tuple[int, int], float] = {}
    before = 0.0
    for stop, log_probs in enumerate(book.values):
        refused = verifying[stop] if stop < len(verifying) else None
        found |= {(stop, token): before + value for token, value in log_probs.items() if token != refused}
        before += log_probs.get(refused, -30.0) if refused is not None else 0.0
    return found


def check(book: Reference, request: Session, verifying: list[int], outcomes: list[Outcome], wanted: int, k: int = 4) -> int:
    """Asserts that these are the likeliest, each drafted for by the book; returns how many were no close calls."""
    by_formula = likeliest(book, request, verifying)
    assert len({(o.accepted, o.token) for o in outcomes}) == len(outcomes) == min(wanted, len(by_formula))
    best = sorted(by_formula.values(), reverse=True)
    for rank, outcome in enumerate(outcomes):
        assert math.isclose(by_formula[outcome.accepted, outcome.token], best[rank], abs_tol=1e-3)
    clear = 0
    for outcome in outcomes:
        expected = book.draft(request.tokens, request.seen, k, [*verifying[: outcome.accepted], outcome.token])
        if book.margin > CLOSE_CALL:
            assert outcome.tokens == expected
            clear += 1
    return clear


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_every_outcome_is_drafted_by_the_book(tmp_path: Path, head: TinyHead, as_on_gpu: bool) -> None:
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    # One token is outside a reduced vocabulary, one draft is shorter than the others.
    requests = [begun(proposer, key, length) for key, length in enumerate((9, 2, 40))]
    verifying = [requests[0].draft().tokens, [60, 3], requests[2].draft(3).tokens]
    wanted = [8, 5, 12]
    premises = [r.premise(v, n) for r, v, n in zip(requests, verifying, wanted, strict=True)]
    clear = 0
    for request, tokens, outcomes, count in zip(requests, verifying, proposer.draft_outcomes(premises), wanted, strict=True):
        clear += check(book, request, tokens, outcomes, count)
    assert clear > 15


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("cut", [4, 3, 1], ids=["whole", "but the last", "first"])
def test_what_drafting_has_computed_is_not_computed_again(tmp_path: Path, cut: int, as_on_gpu: bool) -> None:
    head = TinyHead(layers=2)
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    requests = [begun(proposer, key, length) for key, length in enumerate((9, 30, 40))]
    for last in (False, True):
        # Room for branches is made first: a sequence that moves leaves its draft's rows behind.
        drafts = proposer.draft([r.ask(4) for r in requests])
        verifying = [drafts[0].tokens[:cut], drafts[1].tokens[: max(cut - 1, 1)], drafts[2].tokens[:cut]]
        premises = [r.premise(v, 6) for r, v in zip(requests, verifying, strict=True)]
        with mock.patch.object(
            DecodeBatch, "advance_forced", autospec=True, side_effect=DecodeBatch.advance_forced, __name__="advance_forced"
        ) as followed:
            found = proposer.draft_outcomes(premises)
        if last:
            assert followed.call_count == (1 if cut == 4 else 0)
        clear = sum(check(book, r, v, o, 6) for r, v, o in zip(requests, verifying, found, strict=True))
        assert clear > 8


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("head", [HEADS["plain"], HEADS["norm output"]], ids=["plain", "norm output"])
def test_one_pass_over_a_draft_on_its_true_features_is_as_good_as_one_for_each_token(
    tmp_path: Path, head: TinyHead, as_on_gpu: bool
) -> None:
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    requests = [begun(proposer, key, 20 + key) for key in range(3)]
    # The second enumeration finds room, so what drafting has left is still there.
    for _ in range(2):
        verifying = [request.draft(2 + i).tokens for i, request in enumerate(requests)]
        premises = [r.premise(v, 6) for r, v in zip(requests, verifying, strict=True)]
        follow = mock.patch.object(DecodeBatch, "follow", autospec=True, side_effect=AssertionError, __name__="follow")
        with mock.patch("backend.drafter.outcomes._known", return_value=0), follow:
            found = proposer.draft_outcomes(premises)
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
        with mock.patch.object(DecodeBatch, "follow", autospec=True, side_effect=AssertionError, __name__="follow"):
            found = proposer.draft_outcomes(premises)
        for request, premise, own in zip(requests, premises, found, strict=True):
            # Up to the second stop all features are true ones.
            for outcome in (each for each in own if each.accepted <= 1):
                assumed = [*premise.verifying[: outcome.accepted], outcome.token]
                if book.draft(request.tokens, request.seen, 4, assumed) == outcome.tokens:
                    exact += 1
                else:
                    assert book.margin < CLOSE_CALL
    assert exact > 20


def test_another_draft_than_that_of_the_outcome_is_taken_token_by_token(tmp_path: Path) -> None:
    head = TinyHead()
    proposer, book = make_proposer(tmp_path, head), Reference(head)
    request = begun(proposer, 1, 20)
    draft = request.draft().tokens
    outcome = proposer.draft_outcomes([request.premise(draft, 6)])[0][0]
    request.commit([*draft[: outcome.accepted], outcome.token]).draft(0)
    other = [(outcome.tokens[0] + 1) % 60, 3, 4]
    assert check(book, request, other, proposer.draft_outcomes([request.premise(other, 6)])[0], 6) > 2


def test_what_drafting_has_computed_stays_a_request_s_own(tmp_path: Path) -> None:
    """On a GPU the next draft, of another request, is made in the same tensors."""
    head = TinyHead()
    proposer, book = make_proposer(tmp_path, head, as_on_gpu=True), Reference(head)
    requests = [begun(proposer, key, 20 + key) for key in range(3)]
    for _ in range(2):
        verifying = [request.draft().tokens[:3] for request in requests]
        found = [proposer.draft_outcomes([r.premise(v, 6)])[0] for r, v in zip(requests, verifying, strict=True)]
    assert sum(check(book, r, v, o, 6) for r, v, o in zip(requests, verifying, found, strict=True)) > 8


def test_outcomes_equal_those_of_a_fresh_sequence(tmp_path: Path) -> None:
    head = TinyHead(layers=2)
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 30)
    verifying = request.draft().tokens
    for step in range(12):
        proposer.draft_outcomes([request.premise(verifying, 16)])
        verifying = request.commit(tokens_of(step, 1 + step % 3)).draft().tokens
        assert request.draft().tokens == verifying
    alone = make_proposer(tmp_path / "fresh", head)
    other = Session(alone, 1, request.tokens)
    assert other.draft().tokens == verifying
    expected, found = (
        alone.draft_outcomes([other.premise(verifying)])[0],
        proposer.draft_outcomes([request.premise(verifying)])[0],
    )
    assert [(o.accepted, o.token, o.tokens) for o in found] == [(o.accepted, o.token, o.tokens) for o in expected]
    for one, two in zip(found, expected, strict=True):
        assert one.signs == pytest.approx(two.signs, abs=1e-3)


def test_what_cannot_be_enumerated_is_empty(tmp_path: Path) -> None:
    head = TinyHead()
    proposer = make_proposer(tmp_path, head)
    request = begun(proposer, 1, 20)
    draft = request.draft().tokens
    base_len = len(request.tokens)
    for premise in (
        Premise("ghost", base_len, Until(4), draft, 8),
        Premise(1, base_len + 1, Until(4), draft, 8),
        Premise(1, base_len, Until(4), [], 8),
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
