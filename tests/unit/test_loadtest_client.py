"""The load test's client: every chunk is dated when it comes, and everything that breaks is a failure."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from loadtest.client import Client
from loadtest.timing import Answer
from loadtest.workloads import Ask
from tests.support.sse_server import Framing, PiecewiseServer, read_request, stream_of

ASK = Ask("label", "/v1/completions", {"model": "m"})
TEXTS = ("a", "b", "c", "d")


@contextmanager
def serving(
    pieces: Sequence[bytes], framing: Framing = "chunked", cut_off: bool = False
) -> Iterator[tuple[PiecewiseServer, Client]]:
    server = PiecewiseServer(pieces, framing, cut_off)
    client = Client(server.url, None, timeout_s=5, clock=server.clock)
    try:
        yield server, client
    finally:
        client.close()
        server.close()


def answer_to(pieces: Sequence[bytes], framing: Framing = "chunked", cut_off: bool = False) -> Answer:
    with serving(pieces, framing, cut_off) as (_, client):
        return client.ask(ASK, 0, 0)


@pytest.mark.parametrize("framing", ["chunked", "close", "length"])
def test_each_chunk_is_dated_before_the_next_is_sent(framing: Framing) -> None:
    # The server sends a piece when the one before it has been dated: whoever waits to fill a buffer waits for ever.
    answer = answer_to(stream_of(*TEXTS), framing)
    assert (answer.outcome, answer.reason) == ("ok", "")
    assert answer.chunks == [1.0, 2.0, 3.0, 4.0]
    assert (answer.text, answer.tokens, answer.finish_reason) == ("abcd", 4, "length")
    assert answer.size == len(b"".join(stream_of(*TEXTS)))


def test_pieces_need_not_be_events() -> None:
    whole = b"".join(stream_of("ä", "🌲", "c"))
    pieces = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    ends = [whole.index(b"\n\n", at) for at in (0, whole.index(b"\n\n") + 2)]
    answer = answer_to(pieces)
    assert (answer.outcome, answer.text) == ("ok", "ä🌲c")
    # A chunk is as old as the piece that completed its event.
    assert answer.chunks[:2] == [(end + 1) // 7 + 1 for end in ends]


@pytest.mark.parametrize(
    ("pieces", "framing", "cut_off", "reason"),
    [
        (stream_of(*TEXTS, done=False), "chunked", False, "no [DONE]"),
        (stream_of(*TEXTS, done=False), "close", True, "no [DONE]"),
        (stream_of(*TEXTS)[:2], "chunked", True, "broken off"),
        ([*stream_of(*TEXTS), b"data: "], "chunked", False, "an unfinished event"),
        ([b"data: \xff\n\n"], "chunked", False, "broken off: UnicodeDecodeError"),
    ],
)
def test_what_breaks_is_a_failure(pieces: list[bytes], framing: Framing, cut_off: bool, reason: str) -> None:
    answer = answer_to(pieces, framing, cut_off)
    assert answer.outcome == "failed"
    assert answer.reason.startswith(reason)


def test_an_abort_closes_the_connection() -> None:
    with serving(stream_of(*TEXTS)) as (server, client):
        answer = client.ask(Ask("label", "/v1/completions", {}, abort_after=2), 0, 0)
        assert (answer.outcome, answer.chunks) == ("aborted", [1.0, 2.0])
        for _ in TEXTS:
            server.release()
        assert server.client_left.wait(5)


def test_nobody_there_is_a_failure_and_no_exception() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answer = Client(f"http://127.0.0.1:{port}", None, 1).ask(ASK, 0, 0)
    assert (answer.outcome, answer.reason) == ("failed", "no answer: ConnectionError")


ERROR = b'{"error": {"message": "No.", "type": "t", "param": null, "code": "c"}}'


@pytest.mark.parametrize(
    ("status", "headers", "body", "expect", "outcome"),
    [
        (400, b"", ERROR, 400, "ok"),
        (400, b"", b'{"detail": "no"}', 400, "failed"),
        (500, b"", ERROR, 400, "failed"),
        (200, b"content-type: text/event-stream\r\n", b"data: [DONE]\n\n", 400, "failed"),
        (429, b"retry-after: 1\r\n", ERROR, 200, "rejected"),
        (429, b"", ERROR, 200, "failed"),
        (200, b"content-type: application/json\r\n", b"{}", 200, "failed"),
    ],
)
def test_statuses(status: int, headers: bytes, body: bytes, expect: int, outcome: str) -> None:
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
        assert client.ask(Ask("label", "/v1/completions", {}, expect_status=expect), 0, 0).outcome == outcome
        thread.join(5)
        client.close()
