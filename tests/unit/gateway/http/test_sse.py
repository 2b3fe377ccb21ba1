"""Events on their way to a connection (`gateway/http/sse.py`): what is taken, and when a silent stream gets a comment."""

import asyncio

import pytest

from gateway.http.errors import ShuttingDown
from gateway.http.sse import CHAT, KEEP_ALIVE, KEEP_ALIVE_S, MESSAGES, Events, event
from gateway.storage.responses.events import DIALECT as RESPONSES


@pytest.fixture(autouse=True)
def interval(monkeypatch):
    monkeypatch.setattr("gateway.http.sse.KEEP_ALIVE_S", 10.0)


@pytest.fixture
async def events(interval):
    events = Events()
    yield events
    events.close()


def due_in(events: Events) -> float:
    """Seconds until it is looked at whether the stream is silent."""
    return events._timer.when() - asyncio.get_running_loop().time()


async def test_what_came_together_is_taken_together(events):
    for each in (b"a", b"b", b"c"):
        events.put(each)
    assert events.take() == b"abc"
    assert events.empty
    assert events.take() == b""


async def test_nothing_comes_after_the_end(events):
    events.put(b"a")
    events.end(ShuttingDown())
    events.put(b"b")
    events.end()
    assert events.take() == b"a"
    assert isinstance(events.error, ShuttingDown)


async def test_whoever_waits_is_woken_by_an_event_and_by_the_end(events):
    for happen in (lambda: events.put(b"a"), events.end):
        waiting = asyncio.ensure_future(events.more())
        await asyncio.sleep(0)
        happen()
        await asyncio.wait_for(waiting, 120)


async def test_a_comment_comes_one_interval_after_the_last_event(events):
    events._taken_at -= 4
    events._silent()
    assert events.empty
    assert due_in(events) == pytest.approx(6, abs=0.5)
    events._taken_at -= 6
    events._silent()
    assert events.take() == KEEP_ALIVE
    assert due_in(events) == pytest.approx(10, abs=0.5)


async def test_a_client_that_takes_nothing_gets_no_heap_of_comments(events):
    for _ in range(3):
        events._taken_at -= 10
        events._silent()
    assert events.take() == KEEP_ALIVE


@pytest.mark.parametrize("dialect", [CHAT, MESSAGES, RESPONSES])
async def test_what_keeps_a_stream_open_is_no_event_without_data(dialect, monkeypatch):
    events = Events(dialect)
    for before in (b"", event({"type": "response.created"}, "response.created")):
        if before:
            events.put(before)
            events.take()
        monkeypatch.setattr(events, "_taken_at", events._loop.time() - KEEP_ALIVE_S)
        events._silent()
        blocks = (events.take() + event({})).split(b"\n\n")
        assert all(b"data: " in block for block in blocks if block)
        assert (blocks[0] == b'event: ping\ndata: {"type":"ping"}') == (dialect is MESSAGES)
        assert blocks[0].startswith(b"event: keepalive\n") == (dialect is RESPONSES and bool(before))
    events.close()
