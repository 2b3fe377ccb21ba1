"""The verifier's own look-up: what it learns without verifying, when it steps in, and that it never holds what is over."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.verifier.fallback import EVIDENCE, GAIN, INDEXED_PER_STEP, PROBE_STEPS, WINDOW, Chance, Fallback

K = 4
CHEAP = 1.0
"""A step costs the same with drafts as without."""


def run(fallback: Fallback, tokens: list[int], prompt: int = 8, request_id: str = "r", per_step: int = 1) -> None:
    """The request grows from its prompt to `tokens`, `per_step` tokens a step."""
    for length in [*range(prompt, len(tokens), per_step), len(tokens)]:
        fallback.begin_step()
        fallback.advance(request_id, tokens[:length])


def period(length: int, of: int = 5) -> list[int]:
    return [10 + i % of for i in range(length)]


def fresh(length: int) -> list[int]:
    return list(range(100, 100 + length))


def test_a_request_that_repeats_itself_is_drafted_for() -> None:
    fallback = Fallback(K)
    run(fallback, period(60))
    assert fallback.draft("r", 60, K, CHEAP) == period(64)[60:]
    assert fallback.draft("r", 60, 2, CHEAP) == period(62)[60:]


def test_a_draft_is_only_for_the_length_that_was_announced() -> None:
    fallback = Fallback(K)
    run(fallback, period(60))
    assert fallback.draft("r", 61, K, CHEAP) == []
    assert fallback.better("r", 61, K) == []
    assert fallback.draft("stranger", 60, K, CHEAP) == []


def test_it_pays_only_where_acceptance_outweighs_the_price() -> None:
    fallback = Fallback(K)
    run(fallback, period(60))
    assert fallback.draft("r", 60, K, 4.0)
    assert fallback.draft("r", 60, K, 5.0) == [], "five times the step's cost for five tokens at most"


def test_acceptance_is_learned_without_verifying_anything() -> None:
    """Bigrams that come back with another successor each time: what is found is wrong, and soon no longer used."""
    misleading = [t for i in range(40) for t in (1, 2, 100 + i)]
    fallback = Fallback(K)
    run(fallback, misleading)
    assert fallback.draft("r", len(misleading), K, CHEAP) == []
    run(fallback, misleading + period(60), prompt=len(misleading))
    assert fallback.draft("r", len(misleading) + 60, K, CHEAP), "and used again when the text has turned"


@pytest.mark.parametrize("per_step", [1, 2, 3, 5])
def test_what_is_learned_does_not_depend_on_the_steps(per_step: int) -> None:
    fallback = Fallback(K)
    run(fallback, period(80), per_step=per_step)
    assert fallback.better("r", 80, K) == period(84)[80:]


def test_a_drafter_as_good_is_kept_unless_waiting_for_it_costs() -> None:
    fallback = Fallback(K)
    run(fallback, period(80))
    for _ in range(20):
        fallback.note_remote("r", K, K)
    assert fallback.preferred(["r"], K, step_s=0.01, wait_s=0.0) == frozenset()
    assert fallback.preferred(["r"], K, step_s=0.01, wait_s=0.003) == {"r"}
    assert fallback.better("r", 80, K) == []
    for _ in range(20):
        fallback.note_remote("r", K, 1)
    assert fallback.preferred(["r"], K, step_s=0.01, wait_s=0.0) == {"r"}
    assert fallback.better("r", 80, K) == period(84)[80:]


def test_one_request_that_needs_its_drafter_makes_the_others_wait_anyway() -> None:
    fallback = Fallback(K)
    run(fallback, period(80), request_id="copying")
    run(fallback, fresh(80), request_id="new")
    for _ in range(20):
        fallback.note_remote("copying", K, K)
    assert fallback.preferred(["copying", "new"], K, step_s=0.01, wait_s=0.01) == frozenset()
    for _ in range(20):
        fallback.note_remote("copying", K, 1)
    assert fallback.preferred(["copying", "new"], K, step_s=0.01, wait_s=0.01) == {"copying"}


def test_drafters_are_asked_again_now_and_then() -> None:
    fallback = Fallback(K)
    run(fallback, period(80))
    for _ in range(20):
        fallback.note_remote("r", K, 0)
    asked = []
    for _ in range(2 * PROBE_STEPS):
        fallback.begin_step()
        asked.append(not fallback.preferred(["r"], K, 0.01, 0.0))
    assert sum(asked) == 2


def test_nothing_is_preferred_before_it_was_seen_to_work() -> None:
    fallback = Fallback(K)
    run(fallback, period(14))
    assert fallback.preferred(["r"], K, step_s=0.001, wait_s=1.0) == frozenset()
    assert fallback.better("r", 14, K, gain=0.0) == []
    assert EVIDENCE > 1 < GAIN


def test_what_look_ups_bring_is_known_of_greedy_and_of_sampled_requests_apart() -> None:
    fallback = Fallback(K)
    run(fallback, period(200), request_id="greedy")
    assert fallback.in_general(0.0) is None
    assert fallback.in_general(0.5) is None
    for length in range(8, 201):
        fallback.begin_step()
        fallback.advance("sampled", [t for i in range(70) for t in (1, 2, 100 + i)][:length], greedy=False)
    greedy, sampled, both = (fallback.in_general(share) or (0.0, 0.0) for share in (1.0, 0.0, 0.5))
    assert greedy[1] > 4 > 1.5 > sampled[1]
    assert both[1] == pytest.approx((greedy[1] + sampled[1]) / 2)


def test_what_look_ups_bring_in_general_outlives_the_requests() -> None:
    fallback = Fallback(K)
    run(fallback, period(20))
    assert fallback.in_general() is None
    for i in range(40):
        run(fallback, period(40), request_id=f"copying {i}")
        fallback.forget(f"copying {i}")
    share, length = fallback.in_general() or (0.0, 0.0)
    assert share > 0.9
    assert length == pytest.approx(1 + share * K, rel=0.05)
    for i in range(40):
        run(fallback, fresh(200), request_id=f"new {i}")
    later, shorter = fallback.in_general() or (1.0, K + 1.0)
    assert later < 0.3 * share
    assert shorter < 0.5 * length


def test_switched_off_it_does_nothing() -> None:
    fallback = Fallback(0)
    run(fallback, period(60))
    assert fallback.in_general() is None
    assert len(fallback) == 0
    assert fallback.draft("r", 60, K, CHEAP) == []
    assert fallback.preferred(["r"], K, 0.01, 1.0) == frozenset()


def test_a_long_prompt_is_indexed_in_parts_and_only_its_end() -> None:
    prompt = [*period(40), *fresh(2 * WINDOW), *period(40)]
    fallback = Fallback(K)
    lookup = None
    indexed = [0]
    for step in range(2 * WINDOW // INDEXED_PER_STEP):
        fallback.begin_step()
        fallback.advance("r", prompt)
        lookup = lookup or fallback._tracks["r"].lookup
        indexed.append(len(lookup._after))
        assert step or indexed[-1] > 0
    assert all(0 <= b - a <= 3 * INDEXED_PER_STEP for a, b in pairwise(indexed))
    assert indexed[-1] <= 3 * WINDOW
    assert indexed[-1] == indexed[-2]


def test_what_is_over_is_forgotten() -> None:
    fallback = Fallback(K)
    run(fallback, period(30))
    fallback.forget("r")
    fallback.forget("r")
    assert len(fallback) == 0
    fallback.note_remote("r", K, 1)
    assert fallback.draft("r", 30, K, CHEAP) == []


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=60), st.integers(0, 8))
def test_an_expected_length_is_possible(drafts: list[tuple[int, int]], k: int) -> None:
    chance = Chance(1.0, 4.0)
    for drafted, accepted in drafts:
        chance.observe(drafted, min(accepted, drafted))
    assert 1 <= chance.length(k) <= 1 + k
    assert chance.seen <= 10 + 1e-9


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=K + 1), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
)
def test_guesses_are_judged_by_what_the_text_became(steps: list[list[int]], prompt: list[int]) -> None:
    """Each look-up is followed until it is wrong or used up; what was counted is what a reader of the text would count."""
    fallback, tokens = Fallback(K), list(prompt)
    fallback.advance("r", tokens)
    track = fallback._tracks["r"]
    seen = 0.0
    kept, tried = track.own.kept, track.own.tried
    for step in steps:
        before = track.guess
        tokens += step
        fallback.begin_step()
        fallback.advance("r", tokens)
        assert track.lookup.tokens == tokens
        if before is None or track.guess is before:
            assert (track.own.kept, track.own.tried) == (kept, tried)
            continue
        base_len, guess = before
        after = tokens[base_len : base_len + len(guess)]
        matched = next((i for i, (a, b) in enumerate(zip(guess, after, strict=False)) if a != b), len(guess))
        assert matched == len(guess) <= len(after) or guess[matched] != after[matched]
        kept, tried, seen = 0.9 * kept + matched, 0.9 * tried + min(matched + 1, len(guess)), 0.9 * seen + 1
        assert (track.own.kept, track.own.tried, track.own.seen) == pytest.approx((kept, tried, seen))
