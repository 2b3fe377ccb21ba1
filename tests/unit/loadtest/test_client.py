"""The load test's client: every chunk is dated when it comes, and everything that breaks is a failure."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence

import pytest

from loadtest.client import Client
from loadtest.scenarios import Request
from loadtest.stream import Answer
from tests.support.sse_server import Framing, PiecewiseServer, read_request, stream_of

REQUEST = Request("label", "/v1/completions", {"model": "m"})
TEXTS = ("a", "b", "c", "d")


def answer_to(pieces: Sequence[bytes], framing: Framing = "chunked", cut_off: bool = False) -> Answer:
    server = PiecewiseServer(pieces, framing, cut_off)
    client = Client(server.url, None, timeout_s=5, clock=server.clock)
    try:
        return client.send(REQUEST)
    finally:
        client.http.close()
        server.close()


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_each_chunk_is_dated_before_the_next_is_sent(framing: Framing) -> None:
    # The server sends a piece when the one before it has been dated: whoever waits to fill a buffer waits for ever.
    answer = answer_to(stream_of(*TEXTS), framing)
    assert answer.fault == ""
    assert answer.chunks == [1.0, 2.0, 3.0, 4.0]
    assert (answer.text, answer.tokens) == ("abcd", 4)


def test_pieces_need_not_be_events() -> None:
    whole = b"".join(stream_of("ä", "🌲", "c"))
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    ends = [whole.index(b"\n\n", at) for at in (0, whole.index(b"\n\n") + 2)]
    answer = answer_to(pieces)
    assert (answer.fault, answer.text) == ("", "ä🌲c")
    # A chunk is as old as the piece that completed its event.
    assert answer.chunks[:2] == [(end + 1) // 7 + 1 for end in ends]


@pytest.mark.parametrize(
    ("pieces", "framing", "cut_off", "fault"),
    [
        (stream_of(*TEXTS, done=False), "close", True, "no [DONE]"),
        (stream_of(*TEXTS)[:2], "chunked", True, "RemoteProtocolError"),
    ],
)
def test_what_breaks_off_is_a_failure(pieces: list[bytes], framing: Framing, cut_off: bool, fault: str) -> None:
    assert answer_to(pieces, framing, cut_off).fault == fault


def test_nobody_there_is_a_failure_and_no_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert Client(f"http://127.0.0.1:{port}", None, 1).send(REQUEST).fault == "ConnectError"


ERROR = b'{"error": {"message": "No.", "type": "t", "param": null, "code": "c"}}'


@pytest.mark.parametrize(
    ("status", "headers", "body", "fault"),
    [
        (429, b"retry-after: 1\r\n", ERROR, "rejected: 429 c"),
        (503, b"retry-after: 1\r\n", b"busy", "rejected: 503 not an OpenAI error"),
        (429, b"", ERROR, "429 c"),
        (500, b"retry-after: 1\r\n", b'{"detail": "no"}', "500 not an OpenAI error"),
        (200, b"content-type: application/json\r\n", b"{}", "content type application/json"),
    ],
)
def test_statuses(status: int, headers: bytes, body: bytes, fault: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                read_request(connection)
                head = b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n" % (status, len(body))
                connection.sendall(head + headers + b"\r\n" + body)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "key", 5, itertools.count().__next__)
        assert client.send(REQUEST).fault == fault
        thread.join(5)
        client.http.close()
