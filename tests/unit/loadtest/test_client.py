"""The load test's client: every chunk is dated when it comes, and everything that breaks is a failure."""

from collections.abc import Iterator

import httpx
import pytest

from loadtest.client import Client
from loadtest.scenarios import LoadRequest
from loadtest.stream import StreamedAnswer
from tests.support.sse_server import stream_of


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
