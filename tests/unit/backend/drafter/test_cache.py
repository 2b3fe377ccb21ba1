"""The cache's books against a dense model: whatever happens, a sequence finds exactly the rows its tokens call for."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend.drafter.cache import SHORTEST, UNIT, RowCache, Sequence
from backend.speculation.tokens import UNKNOWN, common_prefix
from tests.support.properties import examples

Row = tuple[int, ...]
DRAFTED: Row = (-7,)


def shared_prompt(seed: int, cut: int, length: int) -> list[int]:
    cut = min(cut, length)
    return [0] * cut + [seed] * (length - cut)


# Few tokens and few seeds: prefixes are shared and diverge.
tokens_strategy = st.builds(shared_prompt, st.integers(1, 3), st.integers(0, 150), st.integers(1, 150))


class CacheMachine(RuleBasedStateMachine):
    """`rows` stands for the tensors: what a row holds is the token prefix it was made from."""

    @initialize(units=st.sampled_from([1, 3, 8, 13]))
    def build(self, units: int) -> None:
        self.rows: list[Row] = [()] * (units * UNIT)
        self.cache = RowCache(units * UNIT + 5, self.move)
        assert self.cache.capacity == len(self.rows)
        self.expected: dict[int, list[int]] = {}

    def move(self, source: int, target: int, count: int) -> None:
        assert abs(source - target) >= count
        self.rows[target : target + count] = self.rows[source : source + count]

    def extend(self, sequence: Sequence, count: int, scratch: int) -> None:
        start = len(sequence.tokens) - 1 - count
        self.cache.truncate(sequence, start)
        if not self.cache.reserve(sequence, count + scratch, {sequence}):
            assert sequence.length == 0
            return
        place = sequence.start + sequence.length
        self.cache.append(sequence, start, count)
        for i in range(count):
            self.rows[place + i] = tuple(sequence.tokens[: start + i + 2])
        for i in range(scratch):
            self.rows[place + count + i] = DRAFTED

    @rule(key=st.integers(0, 4), tokens=tokens_strategy, share=st.floats(0, 1), scratch=st.integers(0, 5))
    def open(self, key: int, tokens: list[int], share: float, scratch: int) -> None:
        count = round(share * (len(tokens) - 1))
        sequence = self.cache.open(key, list(tokens), len(tokens) - 1 - count)
        self.expected[key] = list(tokens)
        self.extend(sequence, count, scratch)

    @precondition(lambda self: self.expected)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
        lost=st.integers(0, 3),
        again=st.integers(0, 3),
    )
    def commit(self, data: st.DataObject, tokens: list[int], lost: int, again: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        sequence = self.cache.get(key)
        assert sequence is not None
        known = self.expected[key]
        # `again`: positions sent twice; `lost`: tokens of a message that never came.
        repeated = known[len(known) - min(again, len(known) - 1) :] if again and not lost else []
        base_len = len(known) + lost + len(tokens)
        self.cache.extend_tokens(sequence, base_len, repeated + tokens)
        self.expected[key] = known + [UNKNOWN] * lost + tokens
        assert sequence.tokens == self.expected[key]
        count = len(repeated) + len(tokens)
        self.extend(sequence, min(count, base_len - 1), data.draw(st.integers(0, 5)))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        sequence = self.cache.peek(key)
        assert sequence is not None
        kept = data.draw(st.integers(1, len(self.expected[key])))
        self.expected[key] = [*self.expected[key][: kept - 1], 9]
        self.cache.extend_tokens(sequence, kept, [9])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.expected)))
        del self.expected[key]
        self.cache.close(key)
        assert self.cache.peek(key) is None

    @invariant()
    def rows_are_those_of_the_tokens(self) -> None:
        held: list[tuple[int, int]] = []
        for key in self.expected:
            sequence = self.cache.peek(key)
            assert sequence is not None
            assert sequence.tokens == self.expected[key]
            positions = [p for first, count in sequence.spans for p in range(first, first + count)]
            assert positions == sorted(set(positions))
            assert len(positions) == sequence.length <= sequence.room
            for i, position in enumerate(positions):
                assert self.rows[sequence.start + i] == tuple(sequence.tokens[: position + 2])
            if sequence.room:
                held.append((sequence.start, sequence.room))
        held.sort()
        for (start, room), (following, _) in itertools.pairwise(held):
            assert start + room <= following
        assert 0 <= self.cache.usage <= 1
        assert self.cache.usage * self.cache.capacity == pytest.approx(sum(room for _, room in held))

    def teardown(self) -> None:
        """All stretches come back, and are joined again."""
        if hasattr(self, "cache"):
            for key in self.expected:
                self.cache.close(key)
            self.cache.invalidate()
            assert self.cache.reserve(self.cache.open("longest", [0], 0), self.cache.longest)


CacheMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestCacheMachine = CacheMachine.TestCase


def fill(cache: RowCache, key: str, tokens: list[int]) -> Sequence:
    sequence = cache.open(key, tokens, 0)
    assert cache.reserve(sequence, len(tokens) - 1)
    cache.append(sequence, 0, len(tokens) - 1)
    return sequence


def test_rows_are_copied_up_to_the_token_that_differs_and_those_of_a_closed_sequence_are_handed_on() -> None:
    moves: list[tuple[int, int, int]] = []
    cache = RowCache(1024, lambda *move: moves.append(move))
    first = fill(cache, "first", list(range(100)))
    second = cache.open("second", [*range(70), 7, 7, 7], 1000)
    # Row 69 was paired with token 70, which differs.
    assert (second.length, moves) == (69, [(first.start, second.start, 69)])
    third = cache.open("third", [*range(SHORTEST - 1), 5], 1000)
    assert third.length == 0, "so few tokens are not worth sharing"
    cache.close("first")
    last = cache.open("last", [*range(102)], 99)
    assert (last.start, last.length, len(moves)) == (first.start, 99, 1)


@pytest.mark.parametrize("lengths", itertools.permutations((20, 60, 90)))
def test_the_sequence_that_shares_the_most_is_found(lengths: tuple[int, ...]) -> None:
    cache = RowCache(4096, lambda *_: None)
    for shared in lengths:
        fill(cache, str(shared), [*range(shared), 7, *range(shared + 1, 200)])
    for shared in (20, 40, 60, 75, 90, 150):
        # Row 89 would need token 90, which differs in all of them.
        assert cache.open("next", list(range(shared)), 1000).length == min(shared, 90) - 1


@pytest.mark.parametrize("gone", ["first", "second"])
def test_rows_are_found_while_anybody_has_them(gone: str) -> None:
    cache = RowCache(1024, lambda *_: None)
    tokens = list(range(100))
    held = {key: fill(cache, key, [*tokens, ord(key[0])]) for key in ("first", "second")}
    cache.truncate(held[gone], 0)
    assert cache.open("third", [*tokens, 7], 100).length == 99


def test_closed_sequences_go_first_then_the_longest_unused() -> None:
    cache = RowCache(3 * UNIT, lambda *_: None)
    for name in ("a", "b", "c"):
        fill(cache, name, [ord(name)] * UNIT)
    cache.close("b")
    cache.get("a")
    fill(cache, "d", [1] * UNIT)
    assert {k: cache.peek(k).length for k in "acd"} == {"a": 63, "c": 63, "d": 63}  # type: ignore[union-attr]
    fill(cache, "e", [2] * UNIT)
    assert {k: cache.peek(k).length for k in "acde"} == {"a": 63, "c": 0, "d": 63, "e": 63}  # type: ignore[union-attr]
    assert cache.evictions == 2


@given(st.lists(st.integers(0, 1), max_size=600), st.lists(st.integers(0, 1), max_size=600), st.integers(0, 600))
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    a = a[:shared] + a
    b = a[:shared] + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected


def test_rows_of_earlier_weights_serve_no_new_sequence() -> None:
    cache = RowCache(8 * UNIT, lambda source, target, rows: None)
    tokens, others = [1] * (4 * SHORTEST), [2] * (4 * SHORTEST)
    fill(cache, "closed", tokens)
    cache.close("closed")
    still = fill(cache, "open", others)
    cache.invalidate()
    for key, prompt in (("a", tokens), ("b", others)):
        assert cache.open(key, prompt, 1000).length == 0
    # The open one goes on, and closing it leaves nothing behind.
    assert still.length
    cache.close("open")
    assert cache.open("c", others, 1000).length == 0
    fill(cache, "a", tokens)
    cache.close("a")
    assert cache.open("d", tokens, 1000).length > 0
