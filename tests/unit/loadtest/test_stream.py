"""What a load test and its client make of a stream: events wherever the bytes are cut, times, tokens, and every way to fail."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import Client
from loadtest.scenarios import LoadRequest
from loadtest.stream import StreamedAnswer
from tests.support.sse_server import stream_of


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


def chunk(text: str = "", finish: str | None = None) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}]}))


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}))


def usage(tokens: int) -> bytes:
    return event(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}}))


DONE = event("[DONE]")


def read(*timed: tuple[float, bytes], started: float = 10.0, end: float = 20.0) -> StreamedAnswer:
    answer = StreamedAnswer(started)
    for at, received in timed:
        answer.feed(received, at)
    answer.end(end)
    return answer


def test_the_times_of_a_chat_stream() -> None:
    answer = read(
        (10.1, delta(role="assistant", content="")),
        (10.5, delta(content="a")),
        (11.0, delta(content="bc")),
        (12.5, delta("length", content="d")),
        (12.6, usage(9) + DONE),
        end=12.7,
    )
    assert (answer.fault, answer.text, answer.ended) == ("", "abcd", 12.7)
    assert answer.chunks == [10.5, 11.0, 12.5]
    assert answer.figures() == pytest.approx({"tokens": 9, "TTFT": 500, "TPOT": 250, "TGS tok/s": 4})


def test_reasoning_and_tool_calls_are_tokens_too() -> None:
    answer = read((10.5, delta(reasoning="hm")), (11.0, delta(tool_calls=[{"index": 0}])), (11.5, delta("tool_calls")))
    assert answer.chunks == [10.5, 11.0, 11.5]


def test_tokens_that_came_at_one_time_or_were_waiting_to_be_read_have_no_rate() -> None:
    for tokens in (1, 5):
        assert read((11.0, chunk("x", "stop") + usage(tokens) + DONE)).figures() == {"tokens": tokens, "TTFT": 1000}
    answer = read((11.0, chunk("x")), (11.0005, chunk("y", "stop") + usage(64) + DONE))
    assert answer.figures() == {"tokens": 64, "TTFT": 1000}


STREAM = (
    b": keep-alive\n\n"
    + chunk("naïve 🌲").replace(b"\n", b"\r\n")
    + b'event: note\ndata: {"choices": [{"text": "b",\ndata:"finish_reason": "stop"}]}\n\n: another comment\r\n\r\n'
    + usage(4)
    + DONE
    + b": the end\n\n"
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    answer = read(*((12.0, STREAM[a:b]) for a, b in itertools.pairwise(edges)))
    assert (answer.fault, answer.text, answer.tokens, len(answer.chunks)) == ("", "naïve 🌲b", 4, 2)
    assert answer.size == len(STREAM)


def test_an_event_is_complete_with_its_blank_line_and_not_before() -> None:
    answer = read((11.0, chunk("x")[:-1]), (12.0, b"\n" + chunk("y", "stop") + usage(2) + DONE))
    assert answer.chunks == [12.0, 12.0]


GOOD = [(11.0, chunk("x")), (12.0, chunk("y", "stop")), (12.0, usage(2)), (12.0, DONE)]


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        (GOOD[:-1], "no [DONE]"),
        ([*GOOD, (13.0, chunk("z"))], "data after [DONE]"),
        ([*GOOD, (13.0, b"data: ")], "an unfinished event"),
        ([GOOD[0], (12.0, event('{"error": {"code": "gone", "message": "secret"}}')), GOOD[-1]], "error event: gone"),
        ([GOOD[0], (12.0, event("{")), *GOOD[1:]], "an event of another shape"),
        ([GOOD[0], (12.0, b"data: \xff\n\n"), *GOOD[1:]], "an event of another shape"),
        ([GOOD[0], (12.0, event('{"usage": []}')), (12.0, event('{"choices": [{"text": 5}]}'))], "an event of another shape"),
        ([GOOD[2], GOOD[3]], "no tokens"),
        ([GOOD[0], GOOD[2], GOOD[3]], "no finish_reason"),
        ([GOOD[0], GOOD[1], GOOD[3]], "no usage"),
    ],
)
def test_every_way_to_fail(events: list[tuple[float, bytes]], fault: str) -> None:
    assert read(*events).fault == fault


class Pieces(httpx.SyncByteStream):
    """A body that comes piece by piece; `sent` counts them.  It may end with an error."""

    def __init__(self, pieces: list[bytes], error: Exception | None = None) -> None:
        self.pieces, self.error, self.sent = pieces, error, 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            self.sent += 1
            yield piece
        if self.error is not None:
            raise self.error


def answer_to(pieces: Pieces, status: int = 200, **headers: str) -> StreamedAnswer:
    def respond(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers={"content-type": "text/event-stream"} | headers, stream=pieces)

    client = Client("http://x", "key", 5, lambda: float(pieces.sent))
    client.http = httpx.Client(base_url="http://x", transport=httpx.MockTransport(respond))
    return client.send(LoadRequest("label", "/v1/completions", {"model": "m"}))


def test_each_chunk_is_dated_before_the_next_is_sent() -> None:
    answer = answer_to(Pieces(stream_of("a", "b", "c", "d")))
    assert (answer.fault, answer.text, answer.tokens) == ("", "abcd", 4)
    assert answer.chunks == [1.0, 2.0, 3.0, 4.0]


def test_what_breaks_off_is_a_failure() -> None:
    assert answer_to(Pieces(stream_of("a", "b")[:2], httpx.RemoteProtocolError("gone"))).fault == "RemoteProtocolError"


ERROR = b'{"error": {"message": "No.", "type": "t", "param": null, "code": "c"}}'


@pytest.mark.parametrize(
    ("status", "headers", "body", "fault"),
    [
        (429, {"retry-after": "1"}, ERROR, "rejected: 429 c"),
        (503, {"retry-after": "1"}, b"busy", "rejected: 503 not an OpenAI error"),
        (429, {}, ERROR, "429 c"),
        (500, {"retry-after": "1"}, b'{"detail": "no"}', "500 not an OpenAI error"),
        (200, {"content-type": "application/json"}, b"{}", "content type application/json"),
    ],
)
def test_statuses(status: int, headers: dict[str, str], body: bytes, fault: str) -> None:
    assert answer_to(Pieces([body]), status, **headers).fault == fault
