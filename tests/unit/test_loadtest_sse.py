"""The load test's SSE parser: the standard's rules, wherever the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import SseParser

STREAM = (
    b"\xef\xbb\xbf: keep-alive\n\n"
    b'data: {"text": "na\xc3\xafve \xf0\x9f\x8c\xb2"}\r\n\r\n'
    b"event: note\rdata: one\rdata:two\r\r"
    b"id: 7\nretry: 3\ndata\n\n"
    b": another comment\r\n"
    b"data:  two spaces\n\n"
    b"event: without data\n\n"
    b"data: [DONE]\n\n"
    b"data: never finished"
)
EVENTS = [
    '{"text": "naïve 🌲"}',
    "one\ntwo",
    "",
    " two spaces",
    "[DONE]",
]


def parse(pieces: list[bytes]) -> tuple[list[str], SseParser]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)], parser


def test_one_piece() -> None:
    events, parser = parse([STREAM])
    assert events == EVENTS
    assert parser.unfinished


def test_byte_by_byte() -> None:
    events, _ = parse([STREAM[at : at + 1] for at in range(len(STREAM))])
    assert events == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cut_anywhere(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    events, _ = parse([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    assert events == EVENTS


def test_an_event_is_complete_with_its_blank_line_and_not_before() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x\r\n") == []
    assert parser.unfinished
    # The blank line's CR completes it: nobody has to wait for the LF.
    assert parser.feed(b"\r") == ["x"]
    assert parser.feed(b"\ndata: y\n\n") == ["y"]
    assert not parser.unfinished


def test_what_is_not_utf8_is_an_error() -> None:
    with pytest.raises(UnicodeDecodeError):
        SseParser().feed(b"data: \xff\n\n")
