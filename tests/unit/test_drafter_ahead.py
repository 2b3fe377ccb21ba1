"""The mode `ahead` at the protocol: wishes before and after their rounds, fresh drafts first, what is outrun is dropped."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.drafter.eagle import EagleProposer
from backend.drafter.nexts import Nexts, Wanted
from backend.drafter.ngram import NgramProposer
from backend.drafter.service import HELLO_FIRST, DrafterService, Reply
from backend.protocol import (
    PROTOCOL_VERSION,
    Ahead,
    Block,
    Close,
    Commit,
    Draft,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Outcome,
    Refused,
    Round,
    ToVerifier,
    decode_to_drafter,
    decode_to_verifier,
    encode,
)
from tests.support.drafter_heads import TinyHead, make_proposer

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1)
TOKENS = [1, 2, 3, 4, 5, 6]


class Clock:
    """A clock a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Verifier:
    """A verifier in the mode `ahead`: rounds ask for nothing, wishes go to the other socket."""

    def __init__(self, service: DrafterService, name: str = "v", epoch: int = 1) -> None:
        self.service, self.epoch = service, epoch
        self.features, self.drafts = f"{name}/f/{epoch}".encode(), f"{name}/d/{epoch}".encode()
        service.handle(self.features, [encode(Hello(PROTOCOL_VERSION, name, "features", epoch))])
        service.handle(self.drafts, [encode(Hello(PROTOCOL_VERSION, name, "drafts", epoch))])

    def frames(self, *items: Open | Commit | Close, hidden: int = HEAD.hidden) -> list[bytes]:
        rows = [item for item in items if not isinstance(item, Close)]
        pieces = [torch.randn(i.rows, hidden, generator=torch.Generator().manual_seed(i.base_len)) for i in rows]
        data = torch.cat(pieces).numpy().tobytes() if pieces else b""
        return [encode(Round(self.epoch, 7, "float32", hidden, list(items))), data]

    def receive_round(self, *items: Open | Commit | Close) -> None:
        assert self.service.receive(self.features, self.frames(*items)) == []

    def receive_next(self, *items: NextItem) -> None:
        assert self.service.receive(self.drafts, [encode(Next(self.epoch, list(items)))]) == []

    def round(self, *items: Open | Commit | Close) -> list[ToVerifier]:
        self.receive_round(*items)
        return self.work()

    def next(self, *items: NextItem) -> list[ToVerifier]:
        self.receive_next(*items)
        return self.work()

    def step(self) -> list[ToVerifier]:
        return self.read(self.service.work())

    def work(self) -> list[ToVerifier]:
        found: list[ToVerifier] = []
        while self.service.has_work:
            found += self.step()
        return found

    def read(self, replies: list[Reply]) -> list[ToVerifier]:
        messages = [decode_to_verifier(payload) for identity, payload in replies if identity == self.drafts]
        for message in messages:
            assert isinstance(message, Drafts | Ahead)
            assert message.epoch == self.epoch
        return messages


def opening(request_id: str = "a", tokens: list[int] | None = None) -> Open:
    tokens = TOKENS if tokens is None else tokens
    return Open(request_id, len(tokens), list(tokens), len(tokens) - 1, 0)


def drafts_of(messages: list[ToVerifier]) -> list[Draft]:
    assert all(m.seq == 0 for m in messages if isinstance(m, Drafts))
    return [draft for m in messages if isinstance(m, Drafts) for draft in m.items]


def blocks_of(messages: list[ToVerifier]) -> list[Block]:
    return [block for m in messages if isinstance(m, Ahead) for block in m.items]


@pytest.fixture
def proposer(tmp_path: Path) -> EagleProposer:
    return make_proposer(tmp_path, HEAD)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(proposer: EagleProposer, clock: Clock) -> DrafterService:
    return DrafterService("drafter-0", proposer, 60.0, clock)


def dropped(service: DrafterService) -> int:
    return service.stats(0.0).ahead_dropped


def test_messages_survive_the_wire() -> None:
    wish = Next(3, [NextItem("a", 9, 4, [1, 2], 8), NextItem("b", 7, 4, [], 0)])
    assert decode_to_drafter(encode(wish)) == wish
    answer = Ahead(3, 250, [Block("a", 9, [1, 2], [Outcome(0, 5, [6, 7]), Outcome(2, 1, [])])])
    assert decode_to_verifier(encode(answer)) == answer


@pytest.mark.parametrize("first", ["round", "next"])
def test_a_wish_is_granted_whichever_socket_is_first(service: DrafterService, proposer: EagleProposer, first: str) -> None:
    verifier = Verifier(service)
    fresh = NextItem("a", 6, 4, [], 8)
    if first == "round":
        assert verifier.round(opening()) == []
        messages = verifier.next(fresh)
    else:
        assert verifier.next(fresh) == []
        assert not service.has_work
        messages = verifier.round(opening())
    assert [type(m) for m in messages] == [Drafts, Ahead], "the draft is not kept waiting"
    draft, block = drafts_of(messages)[0], blocks_of(messages)[0]
    assert (draft.request_id, draft.base_len, len(draft.tokens)) == ("a", 6, 4)
    assert (block.request_id, block.base_len, block.verifying, len(block.outcomes)) == ("a", 6, draft.tokens, 8)
    # The same draft as a round that asks gets.
    assert Verifier(service, "other").round(Open("a", 6, TOKENS, 5, 4)) == [Drafts(1, 7, 0, 0, [draft])]
    commit = Commit("a", 7, [block.outcomes[0].token], 1, 0)
    verifying = NextItem("a", 7, 3, [9, 8], 5)
    if first == "round":
        assert verifier.round(commit) == []
        messages = verifier.next(verifying)
    else:
        assert verifier.next(verifying) == []
        messages = verifier.round(commit)
    assert [type(m) for m in messages] == [Ahead]
    assert [(b.base_len, b.verifying, len(b.outcomes)) for b in blocks_of(messages)] == [(7, [9, 8], 5)]
    assert all(len(o.tokens) == 3 for o in blocks_of(messages)[0].outcomes)
    assert dropped(service) == 0


def test_all_requests_of_a_step_share_an_answer(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.round(opening("a"), opening("b", [7, 8, 9]), opening("c", [5, 6, 7, 8]))
    messages = verifier.next(NextItem("a", 6, 4, [1, 2], 4), NextItem("b", 3, 2, [3], 6), NextItem("c", 4, 4, [], 0))
    assert [d.request_id for d in drafts_of(messages)] == ["c"]
    assert [type(m) for m in messages] == [Drafts, Ahead]
    assert [(b.request_id, len(b.outcomes)) for b in blocks_of(messages)] == [("a", 4), ("b", 6)]


def test_two_verifiers_get_their_own_answers(service: DrafterService) -> None:
    one, two = Verifier(service, "one"), Verifier(service, "two")
    one.receive_round(opening())
    two.receive_round(opening())
    one.receive_next(NextItem("a", 6, 4, [1, 2], 4))
    two.receive_next(NextItem("a", 6, 4, [], 0))
    replies: list[Reply] = []
    while service.has_work:
        replies += service.work()
    assert sorted(identity for identity, _ in replies) == [one.drafts, two.drafts]
    assert len(blocks_of(one.read(replies))) == 1
    assert len(drafts_of(two.read(replies))) == 1


def test_a_newer_wish_replaces_an_older(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.round(opening())
    verifier.receive_next(NextItem("a", 7, 4, [], 0))
    verifier.receive_next(NextItem("a", 7, 4, [3, 4], 2))
    assert [b.verifying for b in blocks_of(verifier.round(Commit("a", 7, [7], 1, 0)))] == [[3, 4]]
    assert dropped(service) == 1


def test_what_a_request_has_outrun_is_dropped(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.round(opening())
    # Held for a length that is passed over; about a length that is gone; due when the next round comes.
    verifier.receive_next(NextItem("a", 7, 4, [], 8))
    assert verifier.round(Commit("a", 8, [7, 8], 2, 0)) == []
    assert verifier.next(NextItem("a", 7, 4, [], 8)) == []
    verifier.receive_next(NextItem("a", 8, 4, [1], 8))
    assert verifier.round(Commit("a", 9, [9], 1, 0)) == []
    assert dropped(service) == 3
    verifier.receive_next(NextItem("a", 9, 4, [1], 8))
    assert verifier.round(Close("a", "finished")) == []
    assert dropped(service) == 4


def test_a_repeated_round_takes_no_wish_back(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.round(opening())
    verifier.receive_next(NextItem("a", 6, 4, [1, 2], 4))
    # As after a preemption: nothing new, at a length it has had before.
    assert [b.verifying for b in blocks_of(verifier.round(Commit("a", 4, [], 0, 0)))] == [[1, 2]]


def test_fresh_drafts_go_before_outcomes(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.round(opening("a"), opening("b", [7, 8, 9]))
    verifier.receive_next(NextItem("a", 6, 4, [1, 2], 8))
    verifier.receive_next(NextItem("b", 3, 4, [], 0))
    assert [d.request_id for d in drafts_of(verifier.step())] == ["b"]
    # Another fresh wish comes while the outcomes still wait.
    verifier.receive_round(Commit("b", 4, [5], 1, 0))
    verifier.receive_next(NextItem("b", 4, 4, [], 0))
    assert [d.base_len for d in drafts_of(verifier.step())] == [4]
    messages = verifier.work()
    assert [b.request_id for b in blocks_of(messages)] == ["a"]
    assert drafts_of(messages) == []


def test_a_wish_for_an_unknown_request_is_answered_empty(service: DrafterService, clock: Clock) -> None:
    verifier = Verifier(service)
    # Its opening may be on the way: nothing is said until a round shows that it is not.
    assert verifier.next(NextItem("ghost", 9, 4, [], 8)) == []
    assert drafts_of(verifier.round(Commit("ghost", 9, [1], 1, 0))) == [Draft("ghost", 9, [])]
    assert verifier.round(Commit("ghost", 10, [1], 1, 0)) == []
    assert drafts_of(verifier.next(NextItem("ghost", 10, 4, [], 8))) == [Draft("ghost", 10, [])]
    assert verifier.next(NextItem("ghost", 10, 4, [1], 8)) == []
    assert verifier.next(NextItem("ghost", 11, 4, [], 0)) == []
    assert len(drafts_of(verifier.round(opening("ghost", [1] * 11)))[0].tokens) == 4


def test_wishes_nobody_comes_for_are_forgotten(service: DrafterService, clock: Clock) -> None:
    verifier = Verifier(service)
    verifier.next(NextItem("a", 6, 4, [], 8))
    clock.now += 61
    service.sweep()
    assert dropped(service) == 1
    assert verifier.round(opening()) == []


def test_outcomes_are_enumerated_in_bounded_batches(service: DrafterService, proposer: EagleProposer) -> None:
    verifier = Verifier(service)
    verifier.round(*(opening(name, [7, 8, index]) for index, name in enumerate("abcd")))
    proposer.batch_outcomes = 16
    verifier.receive_next(*(NextItem(name, 3, 2, [1], 8) for name in "abcd"))
    assert [[b.request_id for b in blocks_of([m])] for m in verifier.work()] == [["a", "b"], ["c", "d"]]


def test_wishes_for_strangers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, service: DrafterService) -> None:
    monkeypatch.setattr("backend.drafter.nexts.MAX_HELD", 3)
    verifier = Verifier(service)
    verifier.receive_next(*(NextItem(name, 6, 2, [], 0) for name in "abcde"))
    assert dropped(service) == 2
    messages = verifier.round(*(opening(name) for name in "abcde"))
    assert [d.request_id for d in drafts_of(messages)] == ["c", "d", "e"]


def test_a_new_epoch_ends_all_wishes(service: DrafterService) -> None:
    old = Verifier(service)
    old.round(opening())
    old.receive_next(NextItem("a", 6, 4, [1], 8), NextItem("b", 6, 4, [], 8))
    new = Verifier(service, epoch=2)
    assert not service.has_work
    assert dropped(service) == 2
    replies = service.handle(old.drafts, [encode(Next(1, []))])
    assert decode_to_verifier(replies[0][1]) == Refused(HELLO_FIRST)
    assert new.next(NextItem("a", 6, 4, [1], 8)) == []


def test_beyond_the_last_position_drafts_are_empty(tmp_path: Path) -> None:
    proposer = make_proposer(tmp_path, TinyHead(hidden=16, heads=2, kv_heads=1, max_position=8))
    verifier = Verifier(DrafterService("drafter-0", proposer, 60.0))
    verifier.round(opening())
    assert verifier.next(NextItem("a", 9, 4, [1], 4)) == []
    assert drafts_of(verifier.next(NextItem("a", 9, 4, [], 4))) == [Draft("a", 9, [])]
    found = blocks_of(verifier.next(NextItem("a", 6, 4, [1], 4)))[0].outcomes
    assert [len(o.tokens) for o in found] == [1 - o.accepted for o in found]


def test_drafts_after_enumerations_are_those_of_a_fresh_drafter(service: DrafterService, tmp_path: Path) -> None:
    ahead, plain = Verifier(service), Verifier(DrafterService("drafter-1", make_proposer(tmp_path / "plain", HEAD), 60.0))
    ahead.round(opening())
    plain.round(opening())
    for base_len in range(7, 30):
        commit = Commit("a", base_len, [base_len], 1, 0)
        ahead.round(commit)
        plain.round(commit)
        messages = ahead.next(NextItem("a", base_len, 4, [], 6))
        assert drafts_of(messages) == drafts_of(plain.next(NextItem("a", base_len, 4, [], 0)))
        assert len(blocks_of(messages)[0].outcomes) == 6


BAD_ITEMS = {
    "no length": NextItem("b", 0, 4, [], 0),
    "negative k": NextItem("b", 5, -1, [], 0),
    "negative outcomes": NextItem("b", 5, 4, [], -1),
    "token outside": NextItem("b", 5, 4, [HEAD.vocab], 4),
    "negative token": NextItem("b", 5, 4, [-1], 4),
    "long draft": NextItem("b", 5, 4, [1] * 65, 4),
    "twice": NextItem("a", 7, 4, [], 0),
}


@pytest.mark.parametrize("item", BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
def test_a_bad_wish_is_refused_whole(service: DrafterService, item: NextItem) -> None:
    verifier = Verifier(service)
    verifier.round(opening())
    replies = service.handle(verifier.drafts, [encode(Next(1, [NextItem("a", 6, 4, [], 0), item]))])
    assert [identity for identity, _ in replies] == [verifier.drafts]
    assert isinstance(decode_to_verifier(replies[0][1]), Refused)
    assert service.stats(0.0).rejected == 1
    assert not service.has_work


def test_wishes_come_from_their_own_socket(service: DrafterService) -> None:
    verifier = Verifier(service)
    message = decode_to_verifier(service.handle(verifier.features, [encode(Next(1, []))])[0][1])
    assert isinstance(message, Refused)
    assert "drafts socket" in message.reason


def test_prompt_lookup_looks_ahead() -> None:
    verifier = Verifier(DrafterService("drafter-0", NgramProposer(61, 64, 2, 4, 1000), 60.0))
    verifier.service.handle(
        verifier.features, [encode(Round(1, 1, "float32", 0, [Open("a", 8, [1, 2, 3, 4, 5, 6, 1, 2], 0, 0)]))]
    )
    messages = verifier.next(NextItem("a", 8, 2, [], 8))
    assert drafts_of(messages) == [Draft("a", 8, [3, 4])]
    assert blocks_of(messages) == [Block("a", 8, [3, 4], [Outcome(2, 5, [6, 1])])]


junk = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.just("next"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["type", "items", "epoch"]), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(
    junk
    | st.builds(
        lambda items: {"type": "next", "epoch": 1, "items": items},
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 9), st.integers(-1, 5), st.lists(st.integers(-1, 70)), junk)),
    )
)
def test_garbage_costs_nothing(value: object) -> None:
    verifier = Verifier(DrafterService("drafter-0", NgramProposer(61, 64, 2, 4, 100), 60.0))
    replies = verifier.service.handle(verifier.drafts, [msgspec.msgpack.encode(value)])
    assert len(replies) <= 1
    verifier.service.handle(verifier.features, [encode(Round(1, 1, "float32", 0, [Open("z", 4, [1, 2, 1, 2], 0, 0)]))])
    assert drafts_of(verifier.next(NextItem("z", 4, 2, [], 0))) == [Draft("z", 4, [1, 2])]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["want", "fresh", "round", "lost", "close", "take"]), st.integers(1, 6)), max_size=40)
)
def test_an_item_is_due_only_at_its_length_and_accounted_for_once(events: list[tuple[str, int]]) -> None:
    nexts, key, length = Nexts(), ("v", 1, "r"), None
    wanted = taken = 0
    for at, (what, value) in enumerate(events):
        if what in ("want", "fresh"):
            wanted += 1
            item = NextItem("r", value, 4, [1] if what == "want" else [], 0)
            nexts.want(Wanted(key, 1, item, float(at)), length)
        elif what == "round":
            length = value
            nexts.reached(key, value, float(at))
        elif what == "lost" and length is None:
            nexts.unknown(key, value, float(at))
        elif what == "close":
            length = None
            nexts.forget(key)
        elif what == "take":
            due = nexts.is_due
            found = [*nexts.take_fresh(), *nexts.take_waiting(8)]
            assert due == bool(found)
            taken += len(found)
            assert all(f.item.base_len == length for f in found if f.item.verifying)
            assert all(length is None or f.item.base_len == length for f in found)
    nexts.forget(key)
    assert wanted == taken + nexts.dropped
