"""Batches: the room they have beside people, tokens summed over APIs, and lines read from a file."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.fleet.speed import Speed
from gateway.storage.batches.lines import ENVELOPE_BYTES, read
from gateway.storage.batches.objects import NO_USAGE, added
from gateway.storage.batches.pace import BUSY_STRETCH, KEPT_FREE, QUIET_STRETCH, room

speeds = st.none() | st.builds(Speed, st.floats(1e-4, 1), st.floats(0, 1))


@given(st.floats(0, 500), st.booleans(), st.integers(0, 8), st.integers(1, 512), speeds)
def test_batches_leave_slots_and_time(foreground, quiet, verifiers, slots, speed):
    most = room(foreground, quiet, verifiers, slots, speed)
    assert most >= 0
    free = verifiers * slots * (1 - KEPT_FREE) - foreground
    if not verifiers or free <= 0:
        assert most == 0
        return
    assert 1 <= most <= max(1, free, verifiers if speed is None else 0)
    if speed is None or most == 1:
        return
    others = foreground / verifiers
    before = speed.step_s(1) if quiet else speed.step_s(max(others, 1))
    grown = speed.per_request_s * most / verifiers
    assert grown <= before * ((QUIET_STRETCH if quiet else BUSY_STRETCH) - 1) * (1 + 1e-9)


def test_a_slow_verifier_has_less_room_while_people_wait():
    assert room(0, True, 1, 64, Speed(1.0, 0.125)) == 27
    assert [room(n, False, 1, 64, Speed(1.0, each)) for n, each in ((2, 0.125), (1, 0.5), (4, 0.005))] == [1, 1, 20]


@pytest.mark.parametrize(("prompt", "answer"), [("prompt", "completion"), ("input", "output")])
def test_tokens_of_either_api_are_summed(prompt, answer):
    usage: dict[str, Any] = {f"{prompt}_tokens": 3, f"{prompt}_tokens_details": {"cached_tokens": 1}}
    usage |= {f"{answer}_tokens": 5, f"{answer}_tokens_details": {"reasoning_tokens": 2}}
    total = NO_USAGE
    for each in (usage, usage, None, {"prompt_tokens_details": None}):
        total = added(total, each)
    assert total.model_dump() == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 16,
    }


def test_lines_keep_their_numbers_and_checked_ones_have_no_bound(tmp_path):
    path = tmp_path / "in.jsonl"
    long = b"x" * (11 + ENVELOPE_BYTES)
    path.write_bytes(b"\xef\xbb\xbfa\n\n" + long + b"\n" + long + b"y\n" + b" \r\nlast")
    assert list(read(path, 10)) == [(1, b"a\n"), (3, b""), (4, b""), (6, b"last")]
    assert list(read(path)) == [(1, b"a\n"), (3, long + b"\n"), (4, long + b"y\n"), (6, b"last")]
