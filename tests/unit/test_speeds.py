import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet import VerifierStats
from backend.speeds import UNKNOWN_RESPONSE_TOKENS, SpeedBook


def report(steps, seconds, verifications, tokens, started_at=1.0, idle=0.0, **fields):
    stats = VerifierStats("v", started_at, "sync", 4, busy_s=seconds, steps=steps, tokens=tokens, **fields)
    stats.verifications = verifications
    stats.idle_s["awaiting_draft"] = idle
    return stats


def run(book, batches, step_s, sequence_s, tokens_per=3):
    steps = seconds = verifications = tokens = 0
    book.observe(report(0, 0.0, 0, 0), 1000)
    for batch in batches:
        steps += 10
        seconds += 10 * (step_s + sequence_s * batch)
        verifications += 10 * batch
        tokens += 10 * batch * tokens_per
        book.observe(report(steps, seconds, verifications, tokens), 1000)
    return book.measured("v")


@given(st.lists(st.integers(1, 64), min_size=20, max_size=60), st.floats(1e-3, 0.1), st.floats(0, 0.01))
def test_predicted_steps_of_the_batches_seen_are_near_those_measured(batches, step_s, sequence_s):
    measured = run(SpeedBook(), batches, step_s, sequence_s)
    assert measured.step_s >= 0
    assert measured.sequence_s >= 0
    assert measured.tokens_per_verification == pytest.approx(3)
    recent = batches[-1]
    true, predicted = step_s + sequence_s * recent, measured.step_s + measured.sequence_s * recent
    assert 0.3 * true < predicted < 3 * true


def test_two_batch_sizes_give_the_line_through_both():
    measured = run(SpeedBook(), [4, 32] * 20, 0.020, 0.001)
    assert measured.step_s == pytest.approx(0.020, rel=0.05)
    assert measured.sequence_s == pytest.approx(0.001, rel=0.05)


def test_waiting_for_drafts_belongs_to_the_step_and_having_no_work_does_not():
    book = SpeedBook()
    book.observe(report(0, 0.0, 0, 0), 1000)
    last = report(10, 0.1, 10, 30, idle=0.1)
    last.idle_s["no_work"] = 50.0
    book.observe(last, 1000)
    measured = book.measured("v")
    assert measured.step_s + measured.sequence_s == pytest.approx(0.02)


def test_nothing_is_known_before_steps_nor_of_another_incarnation_nor_of_one_that_left():
    book = SpeedBook()
    assert book.measured("v") is None
    book.observe(report(5, 1.0, 5, 5), 1000)
    assert book.measured("v") is None
    book.observe(report(9, 2.0, 9, 9), 1000)
    assert book.measured("v") is not None
    book.observe(report(1, 1.0, 1, 1, started_at=2.0), 1000)
    assert book.measured("v") is None
    book.observe(report(9, 2.0, 9, 9, started_at=2.0), 1000)
    book.forget("v")
    assert book.measured("v") is None


def test_room_and_response_length_come_from_the_reports():
    book = SpeedBook()
    book.observe(report(0, 0.0, 0, 0), 1000)
    book.observe(report(9, 1.0, 9, 40, kv_usage=0.25), 1000)
    measured = book.measured("v")
    assert (measured.kv_free, measured.kv_held, measured.response_tokens) == (750, 250, UNKNOWN_RESPONSE_TOKENS)
    book.observe(report(18, 2.0, 18, 80, requests_finished={"stop": 1, "length": 1, "abort": 5}), 1000)
    assert book.measured("v").response_tokens == 40
