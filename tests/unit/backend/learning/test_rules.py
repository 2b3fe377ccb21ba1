"""When a head that learns is published or taken back."""

import pytest

from backend.learning.rules import FEWEST, FEWEST_SEQUENCES, KEPT, LEAST_GAIN, Watch, bound_of_gain


def bound(present: list[float], candidate: list[float]) -> float:
    found = bound_of_gain(present, candidate)
    assert found is not None
    return found


def test_only_a_sure_gain_is_published() -> None:
    present = [2.0 + 0.1 * i for i in range(FEWEST)]
    assert bound(present, [length * 1.1 for length in present]) > LEAST_GAIN
    assert bound(present, [length * 1.01 for length in present]) < LEAST_GAIN
    assert bound_of_gain(present[1:], [length * 1.1 for length in present[1:]]) is None
    # The same mean gain, of one lucky sequence.
    assert bound(present, [*present[:-1], present[-1] + 0.1 * sum(present)]) < LEAST_GAIN


def live(watch: Watch, right: int, sequences: int) -> None:
    """New sequences, of which so many of 16 tokens are right, more or less."""
    for i in range(sequences):
        note(watch, object(), right + i % 3 - 1)


def note(watch: Watch, key: object, right: int) -> None:
    """16 drafts of one sequence."""
    for i in range(16):
        watch.note_first_token(key, i < right)


@pytest.mark.parametrize("together", [KEPT // 2, KEPT + 1, 4 * KEPT])
def test_acceptance_is_known_however_many_requests_are_drafted_for_at_a_time(together: int) -> None:
    watch = Watch()
    for right in (15, 4):
        for start in range(0, 2 * KEPT + together, together):
            for i in range(16):
                for key in range(start, start + together):
                    watch.note_first_token((right, key), 5 * i % 16 < right + key % 3 - 1)
        assert watch.acceptance == pytest.approx(right / 16, abs=0.05)
        if right == 15:
            assert not watch.needs_learning
            watch.exchanged()
            assert watch.acceptance is None
    assert watch.has_fallen
    assert watch.needs_learning


def test_one_text_is_one_observation() -> None:
    watch = Watch()
    live(watch, 10, KEPT)
    watch.exchanged()
    for _ in range(100):
        note(watch, "a text that says what nobody foretells", 0)
    live(watch, 10, FEWEST_SEQUENCES)
    assert not watch.has_fallen
    assert watch.acceptance is not None
    assert watch.acceptance > 0.4


def test_a_head_that_was_hardly_used_is_nothing_to_compare_with() -> None:
    watch = Watch()
    for right, sequences in ((15, FEWEST_SEQUENCES), (1, FEWEST_SEQUENCES - 1)):
        live(watch, right, sequences)
        watch.exchanged()
        assert watch.knows_previous == (right == 15)
    live(watch, 8, FEWEST_SEQUENCES - 1)
    assert not watch.has_fallen, "too few to say"
    live(watch, 8, 1)
    assert watch.has_fallen, "it is compared with the one before"


def test_other_weights_of_the_target_take_no_head_back_but_may_make_it_learn() -> None:
    watch = Watch()
    for _ in range(2):
        live(watch, 15, KEPT + FEWEST_SEQUENCES)
        watch.exchanged()
    live(watch, 15, KEPT + FEWEST_SEQUENCES)
    watch.retargeted()
    assert watch.acceptance is None
    live(watch, 12, KEPT)
    assert not watch.has_fallen
    assert watch.needs_learning
    watch.exchanged()
    live(watch, 6, FEWEST_SEQUENCES)
    assert watch.has_fallen, "the next head is compared under the new weights"


def test_a_given_head_learns_once_its_drafts_are_accepted_less() -> None:
    watch = Watch()

    def needs(right: int, sequences: int) -> bool:
        live(watch, right, sequences)
        return watch.needs_learning

    assert not needs(12, 3 * KEPT)
    assert needs(10, KEPT), "traffic that it does not know"
    watch.exchanged()
    assert not needs(10, 2 * KEPT), "what it has now is what it is compared with"
    watch.exchanged()
    for key in range(2 * KEPT):
        watch.note_first_token(key, False)
    assert not watch.needs_learning, "of each too little to say"
    watch.exchanged()
    assert not needs(7, KEPT), "too few to say"
    assert needs(7, 1)
