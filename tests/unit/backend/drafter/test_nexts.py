"""Wishes of the mode `ahead`, as pure bookkeeping and against garbage: due at its length only, accounted for once."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.nexts import Nexts, Wanted
from backend.drafter.ngram import NgramProposer
from backend.drafter.service import DrafterService
from backend.wire.drafting import Draft, NextItem, Open, Round, encode
from tests.support.ahead_verifier import AheadVerifier, drafts_of, handle
from tests.support.properties import examples

junk = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.just("next"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(["type", "items"]), inner, max_size=3),
    max_leaves=20,
)


@examples(200)
@given(
    junk
    | st.builds(
        lambda items: {"type": "next", "items": items},
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 9), st.integers(-1, 5), st.lists(st.integers(-1, 70)), junk)),
    )
)
def test_garbage_costs_nothing(value: object) -> None:
    verifier = AheadVerifier(DrafterService("drafter-0", NgramProposer(61, 64, 100), 60.0))
    replies = handle(verifier.service, verifier.drafts, [msgspec.msgpack.encode(value)])
    assert len(replies) <= 1
    handle(verifier.service, verifier.features, [encode(Round("float32", 0, [Open("z", 4, [1, 2, 1, 2], 0)]))])
    assert drafts_of(verifier.next(NextItem("z", 4, 2, [], 0))) == [Draft("z", 4, [1, 2])]


@examples(300)
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
            nexts.want(Wanted(key, item, float(at)), length)
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
            found = [*nexts.take_due(), *nexts.take_waiting(8)]
            assert due == bool(found)
            taken += len(found)
            assert all(f.item.base_len == length for f in found if f.item.verifying)
            assert all(length is None or f.item.base_len == length for f in found)
    nexts.forget(key)
    assert wanted == taken + nexts.dropped
