"""The protocol core without sockets: answers, refusals, epochs, several verifiers in one batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.eagle import EagleProposer
from backend.drafter.ngram import NgramProposer
from backend.drafter.proposer import Drafted, DraftRequest
from backend.drafter.service import DrafterService, Reply
from backend.wire.drafting import (
    HELLO_FIRST,
    PROTOCOL_VERSION,
    Close,
    Commit,
    Draft,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Refused,
    Round,
    Welcome,
    decode_to_verifier,
    encode,
)
from tests.support.ahead_verifier import handle
from tests.support.drafter_heads import TinyHead, make_proposer
from tests.support.properties import examples

HEAD = TinyHead(hidden=16, heads=2, kv_heads=1)


class Clock:
    """A clock a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def proposer(tmp_path: Path) -> EagleProposer:
    return make_proposer(tmp_path, HEAD)


@pytest.fixture
def service(proposer: EagleProposer) -> DrafterService:
    return DrafterService("drafter-0", proposer, 60.0, Clock())


class Verifier:
    """A verifier's two sockets, as the service sees them."""

    def __init__(self, service: DrafterService, name: str, epoch: int = 1, greet: bool = True) -> None:
        self.service, self.name, self.epoch = service, name, epoch
        self.features = f"{name}/features/{epoch}".encode()
        self.drafts = f"{name}/drafts/{epoch}".encode()
        if greet:
            self.greet("features")
            self.greet("drafts")

    def greet(self, role: Any) -> None:
        identity = self.features if role == "features" else self.drafts
        replies = handle(self.service, identity, [encode(Hello(PROTOCOL_VERSION, self.name, role, self.epoch))])
        assert [r[0] for r in replies] == [identity]
        welcome = decode_to_verifier(replies[0][1])
        assert isinstance(welcome, Welcome)
        assert (welcome.drafter_id, welcome.version) == ("drafter-0", PROTOCOL_VERSION)

    def frames(
        self, *items: Open | Commit | Close, hidden: int = HEAD.hidden, seed: int = 0, following: Next | None = None
    ) -> list[bytes]:
        rows = sum(item.rows for item in items if not isinstance(item, Close))
        features = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed))
        return [encode(Round("float32", hidden, list(items), None, following)), features.numpy().tobytes()]

    def send(self, *items: Open | Commit | Close, seed: int = 0) -> None:
        assert self.service.receive(self.features, self.frames(*items, seed=seed)) == []

    def ask(self, *items: Open | Commit | Close, k: int | dict[str, int] = 2) -> None:
        """Asks for a draft of `k` tokens of each request, of none where `k` names others."""
        wanted = {i.request_id: i.base_len for i in items if not isinstance(i, Close)}
        sizes = dict.fromkeys(wanted, k) if isinstance(k, int) else k
        wishes = [NextItem(name, wanted[name], size, [], 0) for name, size in sizes.items()]
        assert self.service.receive(self.drafts, [encode(Next(wishes))]) == []

    def round(self, *items: Open | Commit | Close, k: int | dict[str, int] = 2, seed: int = 0) -> list[Draft]:
        """What is drafted once these have come."""
        self.send(*items, seed=seed)
        self.ask(*items, k=k)
        return self.answer(work(self.service))

    def answer(self, replies: list[Reply]) -> list[Draft]:
        mine = [decode_to_verifier(payload) for identity, payload in replies if identity == self.drafts]
        assert len(mine) == 1
        drafts = mine[0]
        assert isinstance(drafts, Drafts)
        return drafts.items


def work(service: DrafterService) -> list[Reply]:
    replies: list[Reply] = []
    while service.has_work:
        replies += service.work()
    return replies


def refusal(replies: list[Reply]) -> str:
    assert len(replies) == 1
    message = decode_to_verifier(replies[0][1])
    assert isinstance(message, Refused)
    return message.reason


def test_wishes_are_answered_item_by_item(service: DrafterService) -> None:
    verifier = Verifier(service, "v")
    opened = Open("a", 5, [1, 2, 3, 4, 5], 4), Open("b", 3, [1, 2, 3], 2), Open("c", 3, [4, 5, 6], 2)
    items = verifier.round(*opened, k={"a": 4, "c": 2})
    assert [(d.request_id, d.base_len, len(d.tokens)) for d in items] == [("a", 5, 4), ("c", 3, 2)]
    items = verifier.round(Commit("a", 7, [7, 8], 2), Close("c", "finished"), Commit("b", 4, [9], 1), k={"a": 3, "b": 1})
    assert [(d.request_id, d.base_len, len(d.tokens)) for d in items] == [("a", 7, 3), ("b", 4, 1)]
    assert service.stats(0.0).sequences == 2


def test_what_a_round_asks_for_is_drafted_with_its_rows(service: DrafterService) -> None:
    apart, together = Verifier(service, "v"), Verifier(service, "w")
    first = Open("a", 5, [1, 2, 3, 4, 5], 4), Open("b", 3, [1, 2, 3], 2)
    for items in (first, (Commit("a", 7, [7, 8], 2), Commit("b", 4, [9], 1))):
        expected, batches = apart.round(*items, k=3), service.stats(0.0).batches
        following = Next([NextItem(item.request_id, item.base_len, 3, [], 0) for item in items])
        assert service.receive(together.features, together.frames(*items, following=following)) == []
        assert together.answer(service.work()) == expected
        assert service.stats(0.0).batches == batches + 1, "rows and drafts are one batch"


def test_a_round_that_asks_for_what_cannot_be_is_refused_whole(service: DrafterService) -> None:
    verifier = Verifier(service, "v")
    twice = Next([NextItem("a", 5, 2, [], 0)] * 2)
    frames = verifier.frames(Open("a", 5, [1, 2, 3, 4, 5], 4), following=twice)
    assert "twice" in refusal(service.receive(verifier.features, frames))
    assert not service.has_work
    assert service.stats(0.0).sequences == 0


def test_counters(service: DrafterService) -> None:
    verifier = Verifier(service, "v")
    verifier.round(Open("a", 5, [1, 2, 3, 4, 5], 4), k=4)
    verifier.round(Commit("a", 6, [6], 1), k=4)
    stats = service.stats(17.0)
    assert (stats.rounds, stats.rows, stats.draft_tokens, stats.rejected) == (2, 5, 8, 0)
    assert (stats.drafter_id, stats.started_at, stats.verifiers) == ("drafter-0", 17.0, ["v"])
    assert 0 < stats.cache_usage < 1


def test_an_unknown_request_gets_an_empty_draft(service: DrafterService) -> None:
    assert Verifier(service, "v").round(Commit("ghost", 9, [1, 2], 2)) == [Draft("ghost", 9, [])]


def test_two_verifiers_share_a_batch_and_nothing_else(proposer: EagleProposer) -> None:
    batches: list[int] = []
    draft = proposer.draft

    def counting(batch: list[DraftRequest]) -> list[Drafted]:
        batches.append(len(batch))
        return draft(batch)

    proposer.draft = counting  # type: ignore[method-assign, assignment]
    service = DrafterService("drafter-0", proposer, 60.0)
    one, two = Verifier(service, "one"), Verifier(service, "two")
    alone = one.round(Open("r", 5, [1, 2, 3, 4, 5], 4), seed=1), two.round(Open("r", 4, [9, 8, 7, 6], 3), seed=2)
    batches.clear()
    for verifier, item, seed in ((one, Open("s", 5, [1, 2, 3, 4, 5], 4), 1), (two, Open("s", 4, [9, 8, 7, 6], 3), 2)):
        verifier.send(item, seed=seed)
        verifier.ask(item)
    replies = service.work()
    assert batches == [2]
    assert not service.has_work
    together = one.answer(replies), two.answer(replies)
    assert [d[0].tokens for d in together] == [d[0].tokens for d in alone]


def test_rounds_about_the_same_request_keep_their_order(service: DrafterService) -> None:
    verifier = Verifier(service, "v")
    verifier.round(Open("x", 3, [1, 2, 3], 2), seed=1)
    expected = verifier.round(Commit("x", 4, [4], 1), seed=2)
    assert handle(service, verifier.features, verifier.frames(Close("x", "finished"))) == []
    last = Commit("y", 4, [4], 1)
    verifier.send(Open("y", 3, [1, 2, 3], 2), seed=1)
    verifier.send(last, seed=2)
    verifier.ask(last)
    assert service.work() == []
    assert [d.tokens for d in verifier.answer(service.work())] == [d.tokens for d in expected]


def test_rounds_before_a_greeting_are_refused(service: DrafterService) -> None:
    verifier = Verifier(service, "v", greet=False)
    replies = handle(service, verifier.features, verifier.frames(Open("a", 3, [1, 2, 3], 2)))
    assert replies[0][0] == verifier.features
    assert refusal(replies) == HELLO_FIRST
    verifier.greet("drafts")
    assert "features socket" in refusal(handle(service, verifier.drafts, verifier.frames()))
    assert service.stats(0.0).rejected == 2


def test_another_protocol_version_is_refused(service: DrafterService) -> None:
    assert "version" in refusal(handle(service, b"v", [encode(Hello(PROTOCOL_VERSION + 1, "v", "features", 1))]))


def test_answers_wait_for_nobody_before_the_drafts_socket_greets(service: DrafterService) -> None:
    verifier = Verifier(service, "v", greet=False)
    verifier.greet("features")
    assert handle(service, verifier.features, verifier.frames(Open("a", 3, [1, 2, 3], 2))) == []
    verifier.greet("drafts")
    assert len(verifier.round(Commit("a", 4, [4], 1))[0].tokens) == 2


def test_a_new_epoch_forgets_requests_but_keeps_rows(service: DrafterService) -> None:
    tokens = list(range(40))
    old = Verifier(service, "v", epoch=1)
    before = old.round(Open("a", 40, tokens, 39), k=4, seed=3)
    new = Verifier(service, "v", epoch=2)
    assert service.stats(0.0).sequences == 0
    assert new.round(Commit("a", 41, [1], 1)) == [Draft("a", 41, [])]
    assert refusal(handle(service, old.features, old.frames(Commit("a", 41, [1], 1)))) == HELLO_FIRST
    frames = old.frames(Open("a", 40, tokens, 39), seed=3)
    features = torch.frombuffer(bytearray(frames[1]), dtype=torch.float32).view(39, HEAD.hidden)
    reopened = Open("a", 40, tokens, 7)
    header = encode(Round("float32", HEAD.hidden, [reopened]))
    assert service.receive(new.features, [header, features[32:].numpy().tobytes()]) == []
    new.ask(reopened, k=4)
    after = new.answer(work(service))
    assert after[0].tokens == before[0].tokens
    assert service.proposer.usage().prefix_rows_reused == 32


def test_idle_requests_are_forgotten(proposer: EagleProposer) -> None:
    clock = Clock()
    service = DrafterService("drafter-0", proposer, 60.0, clock)
    verifier = Verifier(service, "v")
    verifier.round(Open("a", 3, [1, 2, 3], 2), Open("b", 3, [1, 2, 3], 2))
    clock.now += 40
    verifier.round(Commit("b", 4, [4], 1))
    clock.now += 30
    service.sweep()
    assert service.stats(0.0).sequences == 1
    assert verifier.round(Commit("a", 4, [4], 1)) == [Draft("a", 4, [])]


def test_times_are_reported(proposer: EagleProposer) -> None:
    clock = Clock()
    service = DrafterService("drafter-0", proposer, 60.0, clock)
    verifier = Verifier(service, "v")
    opened = Open("a", 3, [1, 2, 3], 2)
    verifier.send(opened)
    verifier.ask(opened)
    clock.now += 0.25
    answer = decode_to_verifier(service.work()[0][1])
    assert isinstance(answer, Drafts)
    assert (answer.queue_us, answer.draft_us) == (250_000, 0)


BAD_ITEMS = {
    "token outside": Open("b", 3, [1, 2, HEAD.vocab], 2),
    "negative token": Open("b", 3, [1, -1, 2], 2),
    "huge token": Open("b", 3, [1, 2**62, 2], 2),
    "tokens short": Open("b", 4, [1, 2, 3], 2),
    "negative seed": Open("b", 3, [1, 2, 3], 2, -1),
    "negative temperature": Open("b", 3, [1, 2, 3], 2, 0, -0.5),
    "no temperature": Open("b", 3, [1, 2, 3], 2, 0, math.nan),
    "rows beyond": Open("b", 3, [1, 2, 3], 3),
    "rows without tokens": Commit("a", 9, [1], 2),
    "no length": Commit("a", 0, [], 0),
    "twice": Commit("a", 6, [5], 1),
}


@pytest.mark.parametrize("item", BAD_ITEMS.values(), ids=BAD_ITEMS.keys())
def test_a_bad_round_is_refused_whole_and_costs_nothing_else(service: DrafterService, item: Open | Commit) -> None:
    verifier = Verifier(service, "v")
    verifier.round(Open("a", 5, [1, 2, 3, 4, 5], 4), seed=1)
    replies = handle(service, verifier.features, verifier.frames(Commit("a", 6, [5], 1), item))
    assert replies[0][0] == verifier.drafts
    assert refusal(replies)
    assert service.stats(0.0).rejected == 1
    other = Verifier(service, "w")
    other.round(Open("a", 5, [1, 2, 3, 4, 5], 4), seed=1)
    assert verifier.round(Commit("a", 6, [5], 1), seed=2) == other.round(Commit("a", 6, [5], 1), seed=2)


def test_bad_frames_are_refused(service: DrafterService) -> None:
    verifier = Verifier(service, "v")
    header, features = verifier.frames(Open("a", 3, [1, 2, 3], 2))
    nan = torch.full((2, HEAD.hidden), float("nan")).numpy().tobytes()
    wide = verifier.frames(Open("a", 3, [1, 2, 3], 2), hidden=17)
    for frames in ([], [header], [header, features[:-1]], [header, features, b""], [header, nan], wide, [header[:-3]], [b""]):
        assert refusal(handle(service, verifier.features, frames))
    assert service.stats(0.0).sequences == 0


@examples(200)
@given(
    frames=st.lists(st.binary(max_size=80), max_size=4)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.just("round") | st.just("hello"),
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.dictionaries(st.sampled_from(["type", "items", "dtype", "hidden", "tokens"]), inner, max_size=6)
        ),
        max_leaves=20,
    ).map(lambda value: [msgspec.msgpack.encode(value), b"1234"])
)
def test_garbage_is_refused(tmp_path_factory: pytest.TempPathFactory, frames: list[bytes]) -> None:
    service = DrafterService("drafter-0", NgramProposer(61, 64, 100), 60.0)
    verifier = Verifier(service, "v")
    before = service.stats(0.0).rejected
    replies = handle(service, verifier.features, frames)
    assert len(replies) <= 1
    if replies and isinstance(decode_to_verifier(replies[0][1]), Refused):
        assert service.stats(0.0).rejected == before + 1


def test_deeply_nested_garbage_is_refused(service: DrafterService) -> None:
    assert refusal(handle(service, b"x", [b"\x91" * 200_000]))


def test_beyond_the_last_position_drafts_are_empty(tmp_path: Path) -> None:
    service = DrafterService("drafter-0", make_proposer(tmp_path, TinyHead(hidden=16, max_position=8)), 60.0)
    verifier = Verifier(service, "v")
    assert len(verifier.round(Open("a", 6, [1] * 6, 5), k=4)[0].tokens) == 2
    assert verifier.round(Commit("a", 9, [1] * 3, 3), k=4) == [Draft("a", 9, [])]
    assert verifier.round(Open("b", 12, [1] * 12, 11), k=4) == [Draft("b", 12, [])]


def test_prompt_lookup_behind_the_same_protocol() -> None:
    service = DrafterService("drafter-0", NgramProposer(61, 64, 1000), 60.0)
    verifier = Verifier(service, "v")
    opened = Open("a", 6, [1, 2, 3, 4, 1, 2], 0)
    assert handle(service, verifier.features, [encode(Round("float32", 0, [opened])), b""]) == []
    verifier.ask(opened, k=3)
    assert verifier.answer(work(service)) == [Draft("a", 6, [3, 4, 1])]
    with_rows = Commit("a", 7, [3], 1)  # as of a head, but without a width
    assert handle(service, verifier.features, [encode(Round("float32", 0, [with_rows])), b""]) == []
    verifier.ask(with_rows, k=2)
    assert verifier.answer(work(service)) == [Draft("a", 7, [4, 1])]
    assert "wide" in refusal(handle(service, verifier.features, verifier.frames(Open("b", 3, [1, 2, 3], 2))))


def test_another_proposer_takes_over_between_two_rounds(service: DrafterService, tmp_path: Path) -> None:
    verifier = Verifier(service, "v")
    tokens = [1, 2, 3, 4, 5]
    (before,) = verifier.round(Open("a", 5, tokens, 4), k=4)
    other = make_proposer(tmp_path / "other", replace(HEAD, seed=9))
    service.replace(other)
    assert refusal(handle(service, verifier.features, verifier.frames(Commit("a", 6, [6], 1)))) == HELLO_FIRST
    verifier.greet("features")
    verifier.greet("drafts")
    (after,) = verifier.round(Open("a", 5, tokens, 4), k=4)
    assert after.tokens != before.tokens
    assert service.stats(0.0).sequences == 1


def test_rows_that_were_projected_for_the_head_before_serve_no_later_request(service: DrafterService, tmp_path: Path) -> None:
    tokens = [1 + i % 7 for i in range(40)]
    Verifier(service, "v")
    service.replace(make_proposer(tmp_path / "other", replace(HEAD, seed=9)))
    # The verifier has yet to learn of the new head.
    Verifier(service, "v").round(Open("a", 40, tokens, 39))
    Verifier(service, "v", epoch=2).round(Open("b", 40, tokens, 8))
    assert not service.proposer.usage().prefix_rows_reused
    Verifier(service, "v", epoch=3).round(Open("c", 40, tokens, 39))
    Verifier(service, "v", epoch=4).round(Open("d", 40, tokens, 8))
    assert service.proposer.usage().prefix_rows_reused


@pytest.mark.parametrize(("weights", "shared"), [(0, True), (1, False)])
def test_other_weights_of_the_target_empty_the_prefix_cache(service: DrafterService, weights: int, shared: bool) -> None:
    tokens = [1 + i % 7 for i in range(40)]
    first = Verifier(service, "v")
    first.round(Open("a", 40, tokens, 39))
    handle(service, first.features, [encode(Hello(PROTOCOL_VERSION, "v", "features", 2, weights=weights))])
    second = Verifier(service, "w")
    second.round(Open("b", 40, tokens, 8))
    assert bool(service.proposer.usage().prefix_rows_reused) == shared
    # Said again, it is nothing new.
    handle(service, first.features, [encode(Hello(PROTOCOL_VERSION, "v", "drafts", 2, weights=weights))])
    assert service.stats(0.0).sequences == 1
