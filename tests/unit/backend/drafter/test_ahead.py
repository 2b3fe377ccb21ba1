"""The mode `ahead`: wishes before and after their rounds, due at their length only, fresh drafts first."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.eagle import EagleProposer
from backend.drafter.nexts import Nexts, Wanted
from backend.drafter.service import DrafterService
from backend.speculation.chances import Rule
from backend.wire.drafting import Ahead, Block, Commit, Draft, Drafts, NextItem, Open, ToVerifier
from tests.support.ahead_verifier import AheadVerifier, Clock, blocks_of, drafts_of, opening
from tests.support.properties import examples


@pytest.mark.parametrize("first", ["round", "next"])
def test_a_wish_is_granted_whichever_socket_is_first(service: DrafterService, proposer: EagleProposer, first: str) -> None:
    verifier = AheadVerifier(service)

    def granted(item: Open | Commit, wish: NextItem) -> list[ToVerifier]:
        if first == "round":
            assert verifier.round(item) == []
            return verifier.next(wish)
        assert verifier.next(wish) == []
        assert not service.has_work
        return verifier.round(item)

    messages = granted(opening(), NextItem("a", 6, 4, [], 8, fresh_k=4))
    assert [type(m) for m in messages] == [Drafts, Ahead], "the draft is not kept waiting"
    draft, block = drafts_of(messages)[0], blocks_of(messages)[0]
    assert (draft.request_id, draft.base_len, len(draft.tokens)) == ("a", 6, 4)
    assert (block.request_id, block.base_len, block.verifying, len(block.outcomes)) == ("a", 6, draft.tokens, 8)
    assert len(draft.signs) == 2 * len(draft.tokens)
    assert all(len(outcome.signs) == 2 * len(outcome.tokens) for outcome in block.outcomes)
    messages = granted(Commit("a", 7, [block.outcomes[0].token], 1), NextItem("a", 7, 3, [9, 8], 5))
    assert [type(m) for m in messages] == [Ahead]
    assert [(b.base_len, b.verifying, len(b.outcomes)) for b in blocks_of(messages)] == [(7, [9, 8], 5)]
    assert all(len(o.tokens) == 3 for o in blocks_of(messages)[0].outcomes)


def test_all_requests_of_a_step_share_an_answer_and_a_fresh_draft_may_be_shorter(service: DrafterService) -> None:
    verifier = AheadVerifier(service)
    verifier.round(opening("a"), opening("b", [7, 8, 9]), opening("c", [5, 6, 7, 8]))
    messages = verifier.next(
        NextItem("a", 6, 4, [1, 2], 3, fresh_k=2), NextItem("b", 3, 2, [3], 6), NextItem("c", 4, 4, [], 5, fresh_k=2)
    )
    assert [type(m) for m in messages] == [Drafts, Ahead]
    assert [(d.request_id, len(d.tokens)) for d in drafts_of(messages)] == [("c", 2)]
    found = [(b.request_id, [len(outcome.tokens) for outcome in b.outcomes]) for b in blocks_of(messages)]
    assert found == [("a", [4] * 3), ("b", [2] * 6), ("c", [4] * 5)]


def test_a_repeated_round_takes_no_wish_back(service: DrafterService) -> None:
    verifier = AheadVerifier(service)
    verifier.round(opening())
    verifier.receive_next(NextItem("a", 6, 4, [1, 2], 4))
    # As after a preemption: nothing new, at a length it has had before.
    assert [b.verifying for b in blocks_of(verifier.round(Commit("a", 4, [], 0)))] == [[1, 2]]


def test_fresh_drafts_go_before_outcomes(service: DrafterService) -> None:
    verifier = AheadVerifier(service)
    verifier.round(opening("a"), opening("b", [7, 8, 9]))
    verifier.receive_next(NextItem("a", 6, 4, [1, 2], 8))
    verifier.receive_next(NextItem("b", 3, 4, [], 0, fresh_k=4))
    assert [d.request_id for d in drafts_of(verifier.step())] == ["b"]
    # Another fresh wish comes while the outcomes still wait.
    verifier.receive_round(Commit("b", 4, [5], 1))
    verifier.receive_next(NextItem("b", 4, 4, [], 0, fresh_k=4))
    assert [d.base_len for d in drafts_of(verifier.step())] == [4]
    messages = verifier.work()
    assert [b.request_id for b in blocks_of(messages)] == ["a"]
    assert drafts_of(messages) == []


def test_a_wish_for_an_unknown_request_is_answered_empty(service: DrafterService, clock: Clock) -> None:
    verifier = AheadVerifier(service)
    # Its opening may be on the way: nothing is said until a round shows that it is not.
    assert verifier.next(NextItem("ghost", 9, 4, [], 8, fresh_k=4)) == []
    messages = verifier.round(Commit("ghost", 9, [1], 1))
    assert (drafts_of(messages), blocks_of(messages)) == ([Draft("ghost", 9, [])], [Block("ghost", 9, [], [])])
    assert verifier.round(Commit("ghost", 10, [1], 1)) == []
    assert drafts_of(verifier.next(NextItem("ghost", 10, 4, [], 0, fresh_k=4))) == [Draft("ghost", 10, [])]
    for verifying in ([], [1]):
        assert verifier.next(NextItem("ghost", 10, 4, verifying, 8)) == [Ahead(0, [Block("ghost", 10, verifying, [])])]
    assert verifier.next(NextItem("ghost", 11, 4, [], 0, fresh_k=4)) == []
    assert len(drafts_of(verifier.round(opening("ghost", [1] * 11)))[0].tokens) == 4


def test_outcomes_of_a_text_that_has_gone_on_are_answered_empty(service: DrafterService) -> None:
    """The verifier may wait for them."""
    verifier = AheadVerifier(service)
    verifier.round(opening("a"), opening("b", [7, 8, 9]))
    verifier.receive_next(NextItem("a", 6, 4, [1, 2], 8), NextItem("b", 3, 4, [], 8, fresh_k=4))
    verifier.receive_round(Commit("a", 7, [5], 1), Commit("b", 4, [5], 1))
    messages = verifier.work()
    assert drafts_of(messages) == [], "it would say that the drafter had no draft"
    assert blocks_of(messages) == [Block("a", 6, [1, 2], []), Block("b", 3, [], [])]
    assert blocks_of(verifier.next(NextItem("a", 6, 4, [1], 8))) == [Block("a", 6, [1], [])], "nor may it come too late"
    assert verifier.next(NextItem("a", 6, 4, [], 0, fresh_k=4)) == []


def test_behind_an_empty_fresh_draft_the_next_tokens_outcomes_are_drafted(service: DrafterService) -> None:
    verifier = AheadVerifier(service)
    verifier.round(opening("a"))
    no_chance = [[0.0, 0.0, -9.0]] * len(Rule)
    messages = verifier.next(NextItem("a", 6, 4, [], 3, floor=0.5, fresh_k=4), chance_weights=no_chance)
    assert drafts_of(messages) == [Draft("a", 6, [])]
    (block,) = blocks_of(messages)
    assert (block.base_len, block.verifying, [each.accepted for each in block.outcomes]) == (6, [], [0] * 3)


def test_outcomes_are_enumerated_in_bounded_batches(monkeypatch: pytest.MonkeyPatch, service: DrafterService) -> None:
    verifier = AheadVerifier(service)
    verifier.round(*(opening(name, [7, 8, index]) for index, name in enumerate("abcd")))
    monkeypatch.setattr("backend.drafter.service.MAX_BATCH_OUTCOMES", 16)
    verifier.receive_next(*(NextItem(name, 3, 2, [1], 8) for name in "abcd"))
    assert [[b.request_id for b in blocks_of([m])] for m in verifier.work()] == [["a", "b"], ["c", "d"]]


@examples(300)
@given(
    st.lists(st.tuples(st.sampled_from(["want", "fresh", "round", "lost", "close", "take"]), st.integers(1, 6)), max_size=40)
)
def test_the_latest_item_is_due_once_and_only_at_its_length(events: list[tuple[str, int]]) -> None:
    nexts, key, lost = Nexts(), ("v", 1, "r"), 0
    length: int | None = None
    latest: NextItem | None = None
    for at, (what, value) in enumerate(events):
        if what in ("want", "fresh"):
            latest = NextItem("r", value, 4, [1] if what == "want" else [], 2, fresh_k=4)
            nexts.want(Wanted(key, latest, float(at)), length)
            if value < (length or 0):
                latest = msgspec.structs.replace(latest, fresh_k=0)
        elif what == "round" or (what == "lost" and length is None):
            known = what == "round"
            if latest and latest.base_len < value:
                latest = msgspec.structs.replace(latest, fresh_k=0)
            nexts.reached(key, value, float(at), known)
            length, lost = (value, 0) if known else (None, value)
            assert nexts.is_due == (latest is not None and latest.base_len <= value)
        elif what == "close":
            length = latest = None
            lost = 0
            nexts.forget(key)
        elif what == "take":
            due = nexts.is_due
            found = [each.item for each in (*nexts.take_fresh(), *nexts.take_outcomes(8))]
            assert found == ([latest] if due else [])
            assert all(item.base_len <= (lost if length is None else length) for item in found)
            assert all(item.base_len >= (length or 0) for item in found if item.fresh_k), "none is for an older text"
            latest = None if found else latest
