"""The EAGLE proposer against the documented equations: batched, ragged, interrupted and resumed, the drafts are the same."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend.drafter import eagle
from backend.drafter.eagle import EagleProposer
from backend.drafter.proposer import MAX_DRAFT, DraftRequest, Premise, Until
from tests.support.drafter_heads import Reference, Session, TinyHead, make_proposer, rows_held, tokens_of
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


def test_attention_needs_no_plan_per_number_of_rows(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_proposer(tmp_path, TinyHead())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def drafts_of(proposer: EagleProposer, asks: list[DraftRequest]) -> list[list[int]]:
    """The tokens; every one has its two signs."""
    found = proposer.draft(asks)
    assert all(len(drafted.signs) == 2 * len(drafted.tokens) for drafted in found)
    return [drafted.tokens for drafted in found]


def assert_drafts(reference: Reference, session: Session, drafts: list[int], k: int) -> None:
    expected = reference.draft(session.tokens, session.seen, k)
    if reference.margin > CLOSE_CALL:
        assert drafts == expected


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.parametrize("long", [3, 1000], ids=["long stretches", "row by row"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_ragged_batches_draft_by_the_book(
    tmp_path: Path, head: TinyHead, long: int, as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle, "LONG", long)
    proposer, reference = make_proposer(tmp_path, head, as_on_gpu=as_on_gpu), Reference(head)
    sessions, k = [Session(proposer, i, tokens_of(i, length)) for i, length in enumerate((9, 2, 40, 5))], 4
    for step in range(4):
        for session, drafts in zip(sessions, drafts_of(proposer, [session.ask(k) for session in sessions]), strict=True):
            assert len(drafts) == k
            assert_drafts(reference, session, drafts, k)
        # Between one and three tokens were decided, rarely those that were drafted: all else is rolled back.
        for i, session in enumerate(sessions):
            session.commit(tokens_of(100 * step + i, 1 + (i + step) % 3))


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


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "still open"])
def test_a_known_prefix_is_reused(tmp_path: Path, closed: bool) -> None:
    head = TinyHead(layers=2)
    proposer, reference, shared = make_proposer(tmp_path, head), Reference(head), tokens_of(4, 50)
    first = Session(proposer, "first", shared + tokens_of(5, 9))
    drafts_of(proposer, [first.ask(4)])
    if closed:
        proposer.close("first")
    # The verifier's own prefix cache computed nothing for the first 45 positions.
    second = Session(proposer, "second", shared + tokens_of(6, 7), skip=45)
    drafts = drafts_of(proposer, [second.ask(4)])[0]
    assert rows_held(proposer, "second") == 56
    second.seen |= {p: second.feature(p) for p in range(45)}
    assert_drafts(reference, second, drafts, 4)
    if not closed:
        assert_drafts(reference, first, drafts_of(proposer, [first.commit([1, 2]).ask(4)])[0], 4)


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
        for key, ask, drafts in zip(batch, asks, drafts_of(proposer, asks), strict=True):
            assert len(drafts) == ask.until.k
            assert_drafts(reference, sessions[key], drafts, ask.until.k)
        for key in data.draw(st.lists(st.sampled_from(batch), unique=True, max_size=1)):
            proposer.close(key)
            del sessions[key]


def test_more_drafts_than_anyone_needs_are_not_made(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead())
    assert len(drafts_of(proposer, [Session(proposer, 0, tokens_of(1, 9)).ask(10_000)])[0]) == MAX_DRAFT


def test_a_full_cache_costs_context_not_answers(tmp_path: Path) -> None:
    head = TinyHead()
    proposer, reference = make_proposer(tmp_path, head, cache_tokens=256), Reference(head)
    sessions = []
    for i in range(6):
        sessions.append(Session(proposer, i, tokens_of(i, 100)))
        assert_drafts(reference, sessions[i], drafts_of(proposer, [sessions[i].ask(3)])[0], 3)
    assert proposer.usage().evictions > 0
    first = sessions[0]
    first.seen.clear()
    assert_drafts(reference, first, drafts_of(proposer, [first.commit([1, 2, 3]).ask(3)])[0], 3)
    # A batch that cannot fit at once is answered as far as it does.
    answers = drafts_of(proposer, [s.commit(tokens_of(i, 100)).ask(3) for i, s in enumerate(sessions)])
    assert [len(a) for a in answers].count(3) >= 2


def test_a_request_longer_than_the_cache_goes_on(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead(), cache_tokens=128)
    session = Session(proposer, 0, tokens_of(1, 60))
    drafts_of(proposer, [session.ask(3)])
    for step in range(60):
        assert len(drafts_of(proposer, [session.commit(tokens_of(step, 3)).ask(3)])[0]) == 3


def test_asking_again_without_news_repeats_the_answer(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead())
    drafts = drafts_of(proposer, [Session(proposer, 0, tokens_of(1, 20)).ask(4)])[0]
    # A preempted request is computed anew: chunks the drafter has already seen carry no rows.
    assert proposer.commit(0, 11, [], 0)
    assert drafts_of(proposer, [DraftRequest(0, 11, 0, None)]) == [[]]
    assert proposer.commit(0, 20, [], 0)
    assert drafts_of(proposer, [DraftRequest(0, 20, 0, None, Until(4))]) == [drafts]
