"""What a load test makes of a stream: times, tokens, and every way to fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.timing import Answer, StreamReader, is_clean_error


def chunk(text: str = "", finish: str | None = None, **fields: Any) -> str:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    return json.dumps({"choices": [choice], **fields})


def delta(finish: str | None = None, **fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, tokens: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens}})


DONE = "[DONE]"


def read(*timed: tuple[float, str], started: float = 10.0, end: float = 20.0, broken: str = "") -> Answer:
    reader = StreamReader(Answer("test", 0, 0, started))
    for at, event in timed:
        reader.take([event], at)
    return reader.end(end, broken)


def test_the_times_of_a_chat_stream() -> None:
    answer = read(
        (10.1, delta(role="assistant", content="")),
        (10.5, delta(content="a")),
        (11.0, delta(content="bc")),
        (12.5, delta("length", content="d")),
        (12.6, usage(7, 9)),
        (12.6, DONE),
        end=12.7,
    )
    assert (answer.outcome, answer.finish_reason, answer.text) == ("ok", "length", "abcd")
    assert answer.ttft_s == pytest.approx(0.5)
    assert answer.gaps_s == pytest.approx([0.5, 1.5])
    assert answer.tpot_s == pytest.approx(2.0 / 8)
    assert answer.tgs == pytest.approx(8 / 2.0)
    assert answer.tgs_e2e == pytest.approx(9 / 2.5)
    assert (answer.prompt_tokens, answer.tokens) == (7, 9)


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    answer = read(
        (10.5, delta(reasoning="hm")),
        (11.0, delta(tool_calls=[{"index": 0}])),
        (11.5, delta("tool_calls")),
        (11.5, usage(1, 3)),
        (11.5, DONE),
    )
    assert answer.chunks == [10.5, 11.0, 11.5]


def test_one_token_has_a_first_token_and_no_rate() -> None:
    answer = read((11.0, chunk("x", "stop")), (11.0, usage(1, 1)), (11.0, DONE))
    assert answer.outcome == "ok"
    assert answer.ttft_s == pytest.approx(1.0)
    assert answer.tgs is None
    assert answer.tpot_s is None
    assert answer.tgs_e2e == pytest.approx(1.0)


GOOD = [(11.0, chunk("x")), (12.0, chunk("y", "stop")), (12.0, usage(1, 2)), (12.0, DONE)]


@pytest.mark.parametrize(
    ("events", "broken", "reason"),
    [
        (GOOD[:-1], "", "no [DONE]"),
        (GOOD, "broken off: ProtocolError", "broken off: ProtocolError"),
        ([*GOOD, (13.0, chunk("z"))], "", "data after [DONE]"),
        ([GOOD[0], (12.0, '{"error": {"code": "gone", "message": "secret"}}'), GOOD[-1]], "", "error event: gone"),
        ([GOOD[0], (12.0, "{"), *GOOD[1:]], "", "an event that is no JSON object"),
        ([GOOD[2], GOOD[3]], "", "no tokens"),
        ([GOOD[0], GOOD[2], GOOD[3]], "", "no finish_reason"),
        ([GOOD[0], GOOD[1], GOOD[3]], "", "no usage"),
        ([], "", "no [DONE]"),
    ],
)
def test_every_way_to_fail(events: list[tuple[float, str]], broken: str, reason: str) -> None:
    answer = read(*events, broken=broken)
    assert (answer.outcome, answer.reason) == ("failed", reason)


def test_leaving_is_no_failure_unless_something_had_gone_wrong() -> None:
    reader = StreamReader(Answer("test", 0, 0, 0.0))
    reader.take([chunk("x")], 1.0)
    assert reader.abort(2.0).outcome == "aborted"
    reader.take(['{"error": {}}'], 3.0)
    assert reader.abort(4.0).outcome == "failed"


def test_a_clean_error_has_all_four_fields() -> None:
    error = {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}
    assert is_clean_error({"error": error})
    for wrong in ({}, None, {"error": "No."}, {"error": {**error, "code": 400}}, {"error": {**error, "message": ""}}):
        assert not is_clean_error(wrong)
    assert not is_clean_error({"error": {key: value for key, value in error.items() if key != "param"}})
