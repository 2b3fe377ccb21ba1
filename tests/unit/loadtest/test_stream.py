"""What a load test makes of a stream: times, tokens, and every way to fail."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.stream import IncompleteAnswer, StreamedAnswer, read, refusal


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def chunk(text: str = "", finish: str | None = None) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}))


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}))


def usage(tokens: int) -> bytes:
    return event(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}))


DONE = event("[DONE]")


def answer_of(*timed: tuple[float, bytes]) -> StreamedAnswer:
    """What is read from a stream whose lines come at these times."""
    times: list[float] = []

    def lines() -> Iterator[bytes]:
        for at, received in timed:
            for line in received.splitlines(keepends=True):
                times.append(at)
                yield line

    return read(lines(), lambda: times[-1])


def test_the_times_of_a_chat_stream() -> None:
    answer = answer_of(
        (10.1, delta(role="assistant", content="")),
        (10.5, delta(content="a")),
        (11.0, delta(content="bc")),
        (12.5, delta("length", content="d")),
        (12.6, usage(9) + DONE),
    )
    assert answer.text == "abcd"
    assert answer.chunks == [10.5, 11.0, 12.5]
    assert answer.figures(10.0) == pytest.approx({"tokens": 9, "TTFT": 500, "TPOT": 250, "TGS tok/s": 4})
    pieces = (delta(reasoning="hm"), delta(tool_calls=[{"index": 0}]), delta("tool_calls") + usage(3) + DONE)
    assert answer_of(*enumerate(pieces)).chunks == [0, 1, 2], "reasoning and calls are tokens too"


def test_tokens_that_came_at_one_time_or_were_waiting_to_be_read_have_no_rate() -> None:
    for tokens in (1, 5):
        answer = answer_of((11.0, chunk("x", "stop") + usage(tokens) + DONE))
        assert answer.figures(10.0) == {"tokens": tokens, "TTFT": 1000}
    answer = answer_of((11.0, chunk("x")), (11.0005, chunk("y", "stop") + usage(64) + DONE))
    assert answer.figures(10.0) == {"tokens": 64, "TTFT": 1000}


def test_comments_names_and_ends_of_lines() -> None:
    stream = (
        b": keep-alive\n\n"
        + chunk("naïve 🌲").replace(b"\n", b"\r\n")
        + b'event: note\ndata:{"choices": [{"text": "b", "finish_reason": "stop"}]}\n\n: another comment\r\n\r\n'
        + usage(4)
        + DONE
        + b": the end\n\n"
    )
    answer = answer_of((12.0, stream))
    assert (answer.text, answer.tokens, len(answer.chunks), answer.size) == ("naïve 🌲b", 4, 2, len(stream))


GOOD = [(11.0, chunk("x")), (12.0, chunk("y", "stop")), (12.0, usage(2)), (12.0, DONE)]


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (GOOD[:-1], "no [DONE]"),
        ([*GOOD, (13.0, b"data: ")], "data after [DONE]"),
        ([GOOD[0], (12.0, event('{"error": {"code": "gone", "message": "secret"}}')), GOOD[-1]], "error event: gone"),
        ([GOOD[0], (12.0, b"data: \xff\n\n"), *GOOD[1:]], "an event of another shape"),
        ([GOOD[0], (12.0, event('{"usage": []}')), (12.0, event('{"choices": [{"text": 5}]}'))], "an event of another shape"),
        ([GOOD[2], GOOD[3]], "no tokens"),
        ([GOOD[0], GOOD[2], GOOD[3]], "no finish_reason"),
        ([GOOD[0], GOOD[1], GOOD[3]], "no usage"),
    ],
)
def test_every_way_to_fail(events: list[tuple[float, bytes]], fault: str) -> None:
    with pytest.raises(IncompleteAnswer) as found:
        answer_of(*events)
    assert str(found.value) == fault


ERROR = b'{"error": {"message": "No.", "type": "t", "param": null, "code": %s}}'


@pytest.mark.parametrize(
    ("status", "headers", "body", "fault"),
    [
        (429, {"retry-after": "1"}, ERROR % b'"c"', "rejected: 429 c"),
        (503, {"retry-after": "1"}, b"busy", "rejected: 503 not an OpenAI error"),
        (429, {}, ERROR % b"null", "429 t"),
        (500, {"retry-after": "1"}, b'{"detail": "no"}', "500 not an OpenAI error"),
    ],
)
def test_statuses(status: int, headers: dict[str, str], body: bytes, fault: str) -> None:
    assert refusal(status, headers, body) == fault
