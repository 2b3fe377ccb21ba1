"""The protocol core without sockets: answers, refusals, epochs, several verifiers in one batch."""

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.eagle import EagleProposer
from backend.drafter.ngram import NgramProposer
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
from tests.support.ahead_verifier import HEAD, AheadVerifier, Clock, blocks_of, drafts_of, handle
from tests.support.drafter_heads import TinyHead, make_proposer, rows_held
from tests.support.properties import examples


class Verifier(AheadVerifier):
    """Asks for drafts of what it has sent."""

    def ask(self, *items: Open | Commit | Close, k: int | dict[str, int] = 2) -> None:
        """Asks for a draft of `k` tokens of each request, of none where `k` names others."""
        wanted = {i.request_id: i.base_len for i in items if not isinstance(i, Close)}
        sizes = dict.fromkeys(wanted, k) if isinstance(k, int) else k
        self.receive_next(*(NextItem(name, wanted[name], size, [], 0, fresh_k=size) for name, size in sizes.items()))

    def drafts_after(self, *items: Open | Commit | Close, k: int | dict[str, int] = 2) -> list[Draft]:
        """What is drafted once these have come."""
        self.receive_round(*items)
        self.ask(*items, k=k)
        return drafts_of(self.work())


def refusal(replies: list[Reply]) -> str:
    assert len(replies) == 1
    message = decode_to_verifier(replies[0][1])
    assert isinstance(message, Refused)
    return message.reason


def test_wishes_are_answered_item_by_item(service: DrafterService) -> None:
    verifier = Verifier(service)
    opened = Open("a", 5, [1, 2, 3, 4, 5], 4), Open("b", 3, [1, 2, 3], 2), Open("c", 3, [4, 5, 6], 2)
    items = verifier.drafts_after(*opened, k={"a": 4, "c": 2})
    assert [(d.request_id, d.base_len, len(d.tokens)) for d in items] == [("a", 5, 4), ("c", 3, 2)]
    items = verifier.drafts_after(Commit("a", 7, [7, 8], 2), Close("c", "finished"), Commit("b", 4, [9], 1), k={"a": 3, "b": 1})
    assert [(d.request_id, d.base_len, len(d.tokens)) for d in items] == [("a", 7, 3), ("b", 4, 1)]
    stats = service.stats()
    assert (stats.sequences, stats.batches, stats.draft_tokens, stats.rejected) == (2, 2, 10, 0)
    assert (stats.drafter_id, stats.verifiers) == ("drafter-0", ["v"])
    assert 0 < stats.cache_usage < 1


def test_what_a_round_asks_for_is_drafted_with_its_rows(service: DrafterService) -> None:
    apart, together = Verifier(service), Verifier(service, "w")
    first = Open("a", 5, [1, 2, 3, 4, 5], 4), Open("b", 3, [1, 2, 3], 2)
    for items in (first, (Commit("a", 7, [7, 8], 2), Commit("b", 4, [9], 1))):
        expected, batches = apart.drafts_after(*items, k=3), service.stats().batches
        following = Next([NextItem(item.request_id, item.base_len, 3, [], 0, fresh_k=3) for item in items])
        assert service.receive(together.features, together.frames(*items, following=following)) == []
        assert drafts_of(together.step()) == expected
        assert service.stats().batches == batches + 1, "rows and drafts are one batch"


def test_two_verifiers_share_a_batch_and_nothing_else(service: DrafterService, proposer: EagleProposer) -> None:
    one, two = Verifier(service, "one"), Verifier(service, "two")
    alone = one.drafts_after(Open("r", 5, [1, 2, 3, 4, 5], 4)), two.drafts_after(Open("r", 4, [9, 8, 7, 6], 3))
    for verifier, item in ((one, Open("s", 5, [1, 2, 3, 4, 5], 4)), (two, Open("s", 4, [9, 8, 7, 6], 3))):
        verifier.receive_round(item)
        verifier.ask(item)
    with mock.patch.object(proposer, "draft", side_effect=proposer.draft) as draft:
        replies = service.work()
    assert [len(call.args[0]) for call in draft.call_args_list] == [2]
    assert not service.has_work
    together = [drafts_of(verifier.read(replies)) for verifier in (one, two)]
    assert [d[0].tokens for d in together] == [d[0].tokens for d in alone]


def test_rounds_about_the_same_request_keep_their_order(service: DrafterService) -> None:
    verifier = Verifier(service)
    verifier.drafts_after(Open("x", 3, [1, 2, 3], 2))
    expected = verifier.drafts_after(Commit("x", 4, [4], 1))
    assert handle(service, verifier.features, verifier.frames(Close("x", "finished"))) == []
    last = Commit("y", 4, [4], 1)
    verifier.receive_round(Open("y", 3, [1, 2, 3], 2))
    verifier.receive_round(last)
    verifier.ask(last)
    assert service.work() == []
    assert [d.tokens for d in drafts_of(verifier.step())] == [d.tokens for d in expected]


def test_another_protocol_version_is_refused(service: DrafterService) -> None:
    assert "version" in refusal(handle(service, b"v", [encode(Hello(PROTOCOL_VERSION + 1, "v", "features", 1))]))


def test_answers_wait_for_nobody_before_the_drafts_socket_greets(service: DrafterService) -> None:
    ((_, payload),) = handle(service, b"v/f/1", [encode(Hello(PROTOCOL_VERSION, "v", "features", 1))])
    assert isinstance(decode_to_verifier(payload), Welcome)
    assert handle(service, b"v/f/1", Verifier(service, "w").frames(Open("a", 3, [1, 2, 3], 2))) == []
    assert len(Verifier(service).drafts_after(Commit("a", 4, [4], 1))[0].tokens) == 2


def test_a_new_epoch_forgets_requests_and_wishes_but_keeps_rows(service: DrafterService, proposer: EagleProposer) -> None:
    tokens = list(range(40))
    old = Verifier(service, epoch=1)
    before = old.drafts_after(Open("a", 40, tokens, 39), k=4)
    old.receive_next(NextItem("a", 40, 4, [1], 8), NextItem("b", 6, 4, [], 8, fresh_k=4))
    new = Verifier(service, epoch=2)
    assert service.stats().sequences == 0
    assert not service.has_work
    assert new.drafts_after(Commit("a", 41, [1], 1)) == [Draft("a", 41, [])]
    assert refusal(service.receive(old.features, old.frames(Commit("a", 41, [1], 1)))) == HELLO_FIRST
    assert refusal(service.receive(old.drafts, [encode(Next([]))])) == HELLO_FIRST
    assert service.stats().rejected == 2
    # Features of the last rows alone.
    reopened, features = Open("a", 40, tokens, 7), old.frames(Open("a", 40, tokens, 39))[1]
    header = encode(Round("float32", HEAD.hidden, [reopened]))
    assert service.receive(new.features, [header, features[-7 * 4 * HEAD.hidden :]]) == []
    new.ask(reopened, k=4)
    assert drafts_of(new.work())[0].tokens == before[0].tokens
    assert rows_held(proposer, ("v", 2, "a")) == 39


def test_requests_wishes_spans_and_lessons_end_together(proposer: EagleProposer, clock: Clock) -> None:
    spans, lessons = mock.Mock(), mock.Mock()
    service = DrafterService("drafter-0", proposer, 60.0, clock, spans, lessons)
    verifier, opened = Verifier(service), [Open(name, 3, [1, 2, 3], 2) for name in "abcd"]
    verifier.receive_next(NextItem("d", 3, 4, [], 8, fresh_k=4))
    verifier.drafts_after(*opened[:2])
    clock.now += 40
    verifier.drafts_after(Commit("b", 4, [4], 1), opened[2])
    clock.now += 30
    service.sweep()
    assert service.stats().sequences == 2
    assert verifier.drafts_after(Commit("a", 4, [4], 1)) == [Draft("a", 4, [])]
    assert verifier.round(opened[3]) == [], "its wish is forgotten"
    verifier.drafts_after(Close("b", "finished"))
    Verifier(service, epoch=2)
    ends = {("a", "idle"), ("d", "idle"), ("b", "finished"), ("c", "epoch")}
    assert {(call.args[0][2], call.args[1]) for call in spans.closed.call_args_list} >= ends
    assert lessons.closed.call_args_list == [mock.call(("v", 1, "b"))]
    assert {call.args[0] for call in lessons.forget.call_args_list} == {("v", 1, name) for name in "abcd"}


def test_times_are_reported(service: DrafterService, clock: Clock) -> None:
    verifier = Verifier(service)
    opened = Open("a", 3, [1, 2, 3], 2)
    verifier.receive_round(opened)
    verifier.ask(opened)
    clock.now += 0.25
    (answer,) = verifier.step()
    assert isinstance(answer, Drafts)
    assert (answer.queue_us, answer.draft_us) == (250_000, 0)


OPENED, GOES_ON, WISHED = Open("a", 5, [1, 2, 3, 4, 5], 4), Commit("a", 6, [5], 1), NextItem("a", 6, 4, [], 0, fresh_k=4)
BAD_ITEMS: dict[str, Open | Commit] = {
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
BAD_WISHES = {
    "no length": NextItem("b", 0, 4, [], 0, fresh_k=4),
    "negative k": NextItem("b", 5, -1, [], 0),
    "negative outcomes": NextItem("b", 5, 4, [], -1),
    "floor above one": NextItem("b", 5, 4, [], 0, 1.5),
    "floor of no number": NextItem("b", 5, 4, [], 0, math.nan),
    "token outside": NextItem("b", 5, 4, [HEAD.vocab], 4),
    "negative token": NextItem("b", 5, 4, [-1], 4),
    "long draft": NextItem("b", 5, 4, [1] * 65, 4),
    "twice": NextItem("a", 7, 4, [], 0, fresh_k=4),
}
BAD_JUDGES = {
    "one": [[1.0, 1.0, 1.0]],
    "four": [[1.0, 1.0, 1.0]] * 4,
    "short": [[1.0, 1.0, 1.0], [1.0, 1.0]],
    "not finite": [[1.0, 1.0, 1.0], [1.0, math.nan, 1.0]],
}
BAD: dict[str, Round | Next] = {
    "a round with a bad wish": Round("float32", HEAD.hidden, [GOES_ON], None, Next([WISHED, WISHED])),
    **{f"item: {name}": Round("float32", HEAD.hidden, [GOES_ON, item]) for name, item in BAD_ITEMS.items()},
    **{f"wish: {name}": Next([WISHED, item]) for name, item in BAD_WISHES.items()},
    **{f"judges: {name}": Next([WISHED], weights) for name, weights in BAD_JUDGES.items()},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_message_is_refused_whole_and_costs_nothing_else(service: DrafterService, bad: Round | Next) -> None:
    verifier, other = Verifier(service), Verifier(service, "w")
    for each in (verifier, other):
        each.drafts_after(OPENED)
    if isinstance(bad, Next):
        replies = service.receive(verifier.drafts, [encode(bad)])
    else:
        replies = service.receive(verifier.features, [encode(bad), verifier.frames(*bad.items)[1]])
    assert replies[0][0] == verifier.drafts
    assert refusal(replies)
    assert service.stats().rejected == 1
    assert not service.has_work
    assert verifier.drafts_after(GOES_ON) == other.drafts_after(GOES_ON)


def test_bad_frames_are_refused(service: DrafterService) -> None:
    verifier = Verifier(service)
    header, features = verifier.frames(Open("a", 3, [1, 2, 3], 2))
    nan = torch.full((2, HEAD.hidden), float("nan")).numpy().tobytes()
    wide = verifier.frames(Open("a", 3, [1, 2, 3], 2), hidden=17)
    for frames in ([header], [header, features[:-1]], [header, features, b""], [header, nan], wide, [header[:-3]], [b""]):
        assert refusal(handle(service, verifier.features, frames))
    assert refusal(handle(service, verifier.features, [b"\x91" * 200_000])), "nested deeply"
    assert service.stats().sequences == 0


def spoil(message: bytes, changes: list[tuple[int, int]]) -> bytes:
    """The message with other bytes at some places."""
    data = bytearray(message)
    for at, byte in changes:
        data[at % len(data)] = byte
    return bytes(data)


SOUND = encode(Round("float32", 0, [Open("a", 4, [1, 2, 1, 2], 0)])), encode(Next([NextItem("a", 4, 2, [1], 8)]))
spoiled = st.builds(spoil, st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255)), max_size=4))


@examples(400)
@given(st.lists(spoiled | st.binary(max_size=80), min_size=1, max_size=4), st.sampled_from(["features", "drafts"]))
def test_garbage_is_refused_and_costs_nothing(frames: list[bytes], socket: str) -> None:
    verifier = Verifier(DrafterService("drafter-0", NgramProposer(61, 64, 100), 60.0))
    replies = handle(verifier.service, getattr(verifier, socket), frames)
    assert len(replies) <= 1
    refused = [payload for _, payload in replies if isinstance(decode_to_verifier(payload), Refused)]
    assert verifier.service.stats().rejected == len(refused)
    handle(verifier.service, verifier.features, [encode(Round("float32", 0, [Open("z", 4, [1, 2, 1, 2], 0)]))])
    assert drafts_of(verifier.next(NextItem("z", 4, 2, [], 0, fresh_k=2))) == [Draft("z", 4, [1, 2])]


def test_beyond_the_last_position_drafts_are_empty(tmp_path: Path) -> None:
    service = DrafterService("drafter-0", make_proposer(tmp_path, TinyHead(hidden=16, max_position=8)), 60.0)
    verifier = Verifier(service)
    assert len(verifier.drafts_after(Open("a", 6, [1] * 6, 5), k=4)[0].tokens) == 2
    assert verifier.drafts_after(Commit("a", 9, [1] * 3, 3), k=4) == [Draft("a", 9, [])]
    assert verifier.drafts_after(Open("b", 12, [1] * 12, 11), k=4) == [Draft("b", 12, [])]


def test_prompt_lookup_behind_the_same_protocol() -> None:
    verifier = Verifier(DrafterService("drafter-0", NgramProposer(61, 64, 1000), 60.0))

    def drafts_after(item: Open | Commit, k: int) -> list[Draft]:
        handle(verifier.service, verifier.features, [encode(Round("float32", 0, [item])), b""])
        messages = verifier.next(NextItem("a", item.base_len, k, [], 8, fresh_k=k))
        assert [block.outcomes for block in blocks_of(messages)] == [[]], "it drafts afresh only"
        return drafts_of(messages)

    assert drafts_after(Open("a", 6, [1, 2, 3, 4, 1, 2], 0), 3) == [Draft("a", 6, [3, 4, 1])]
    # As of a head, but without a width.
    assert drafts_after(Commit("a", 7, [3], 1), 2) == [Draft("a", 7, [4, 1])]
    assert "wide" in refusal(handle(verifier.service, verifier.features, verifier.frames(Open("b", 3, [1, 2, 3], 2))))


def test_another_head_takes_over_between_two_rounds_without_rows_of_the_one_before(
    service: DrafterService, tmp_path: Path
) -> None:
    verifier, tokens = Verifier(service), [1 + i % 7 for i in range(40)]
    (before,) = verifier.drafts_after(Open("a", 40, tokens, 39), k=4)
    other = make_proposer(tmp_path / "other", replace(HEAD, seed=9))
    service.replace(other)
    assert refusal(service.receive(verifier.features, verifier.frames(Commit("a", 41, [6], 1)))) == HELLO_FIRST
    # The verifier has yet to learn of the new head: it still projects features for the one before.
    (after,) = Verifier(service).drafts_after(Open("a", 40, tokens, 39), k=4)
    assert after.tokens != before.tokens
    assert service.stats().sequences == 1
    for epoch, rows, held in ((2, 8, 8), (3, 39, 39), (4, 8, 39)):
        Verifier(service, epoch=epoch).drafts_after(Open("a", 40, tokens, rows))
        assert rows_held(other, ("v", epoch, "a")) == held


@pytest.mark.parametrize(("weights", "shared"), [(0, True), (1, False)])
def test_other_weights_of_the_target_empty_the_prefix_cache(
    service: DrafterService, proposer: EagleProposer, weights: int, shared: bool
) -> None:
    tokens = [1 + i % 7 for i in range(40)]
    first = Verifier(service)
    first.drafts_after(Open("a", 40, tokens, 39))
    handle(service, first.features, [encode(Hello(PROTOCOL_VERSION, "v", "features", 2, weights=weights))])
    second = Verifier(service, "w")
    second.drafts_after(Open("b", 40, tokens, 8))
    assert rows_held(proposer, ("w", 1, "b")) == (39 if shared else 8)
    # Said again, it is nothing new.
    handle(service, first.features, [encode(Hello(PROTOCOL_VERSION, "v", "drafts", 2, weights=weights))])
    assert service.stats().sequences == 1
