"""Server-sent events: carries a stream's events from their source to the client's connection.

A `Dialect` defines how an API writes errors and ends its streams.  Comments between events keep idle connections open.  The
response is held back until the first event, so that a request that cannot be served gets its HTTP status.  If the first event
takes longer than the keep-alive interval, the stream begins with a comment instead.

A source puts events into a buffer and never waits.  The connection's task takes all buffered events and writes them at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backend.engine.front.stream import PlainStream
from gateway.http.errors import ApiError, translate

T = TypeVar("T")
Change = Callable[[str], Awaitable[str]]
"""Makes one or more whole events of an event."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n"
"""A comment.  A blank line would end an event without data, at which some clients (openai-go) end the stream."""
KEEP_ALIVE_S = 15.0
"""Seconds of silence after which a stream gets a comment.  Proxies close connections that look dead."""
HEADERS = {"cache-control": "no-store", "connection": "keep-alive", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialect:
    """An API's stream format.  `failed` makes the events of an error; a last event begins or ends with one of `ends`."""

    failed: Callable[[ApiError], bytes]
    ends: tuple[bytes, ...]
    waiting: bytes = KEEP_ALIVE
    """What keeps the connection open before the first event."""
    silent: bytes = KEEP_ALIVE
    """What keeps it open between events: itself an event where clients count only events."""


CHAT = Dialect(lambda error: event(error.body()) + DONE, (DONE,))
"""Chat completions and completions: events are `data: {json}`, the last is `data: [DONE]`."""


def event(body: object, name: str | None = None) -> bytes:
    """One event with `body` as JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


PING = event({"type": "ping"}, "ping")
MESSAGES = Dialect(lambda error: event(error.anthropic_body(), "error"), (b"event: message_stop", b"event: error"), PING, PING)
"""Anthropic's messages: every event has a name."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`; cancels it and raises `ClientDisconnect` when the client leaves first.  The body must have been read."""
    # In a task of its own: vLLM turns a cancellation into an answer, so a cancellation of this coroutine would be lost.
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Generated:
    """Events from strings that vLLM's serving classes yield; each passes through `changes`."""

    def __init__(self, chunks: AsyncGenerator[str, None], changes: Sequence[Change] = ()) -> None:
        self._chunks, self._changes = chunks, changes

    async def start(self, stream: EventStream) -> None:
        """Puts all events, and returns at the end."""
        async for chunk in self._chunks:
            for change in self._changes:
                chunk = await change(chunk)
            stream.put(chunk.encode())
        stream.end()

    async def close(self) -> None:
        await self._chunks.aclose()


async def stream_response(request: Request, source: Generated | PlainStream, dialect: Dialect) -> EventStream:
    """The streaming response for a source's events.  Before the first event, raises `ApiError` or `ClientDisconnect`."""
    stream = EventStream(request, source, dialect)
    try:
        await stream.begun()
    except BaseException:
        await stream.close()
        raise
    return stream


class EventStream(Response):
    """One stream.  Its source puts events into a buffer; the connection's task writes all of them at once, in one piece."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, source: Generated | PlainStream, dialect: Dialect) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._source = source
        self._dialect = dialect
        self._metrics = request.app.state.gateway.metrics
        self._parts: list[bytes] = []
        self._last = b""
        self._ended = False
        self._error: ApiError | None = None
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._taken_at = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._silent)
        self._leaving = asyncio.ensure_future(_disconnect(request))
        self._leaving.add_done_callback(lambda _: self._news.set())
        # A task, because a request may wait for room: meanwhile comments are written, and its client may leave.
        self._starting = asyncio.create_task(self._start())

    # What the source calls

    def put(self, events: bytes) -> None:
        """Adds one or more whole events; ignored after the end."""
        if not self._ended:
            self._parts.append(events)
            self._last = events
            self._news.set()

    def end(self, error: Exception | None = None) -> None:
        """The stream is complete, or has failed with `error`.  Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            self._error = translate(error)
            if self._error.status == 500:
                logger.error("a stream failed: %s", type(error).__name__)
        self._news.set()

    # The connection's task

    async def begun(self) -> None:
        """Returns when there is something to write.  Raises `ClientDisconnect`, or the error of a stream that has no event."""
        while not self._parts and not self._ended:
            if self._leaving.done():
                raise ClientDisconnect
            await self._more()
        if not self._parts and self._error is not None:
            raise self._error

    async def close(self) -> None:
        self._timer.cancel()
        self._leaving.cancel()
        if not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._source.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = self._leaving
        complete = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not self._ended and not leaving.done():
                if not self._parts:
                    await self._more()
                    continue
                await send({"type": "http.response.body", "body": self.take(), "more_body": True})
                # Whoever has read the last event may go before the source has cleared up.
                complete = self._said_all() and not leaving.done()
            if not leaving.done():
                rest = self.take()
                if self._error is not None:
                    rest += self._dialect.failed(self._error)
                await send({"type": "http.response.body", "body": rest, "more_body": False})
                # `send` waits for a client that reads nothing, and returns when that one is gone.
                complete = not leaving.done()
            if not complete:
                self._metrics.disconnects.inc()
        finally:
            await self.close()

    async def _start(self) -> None:
        try:
            await self._source.start(self)
        except Exception as error:
            self.end(error)

    def take(self) -> bytes:
        """Takes out all buffered events."""
        self._taken_at = self._loop.time()
        events = b"".join(self._parts)
        self._parts.clear()
        return events

    def _said_all(self) -> bool:
        """Whether the last event has been taken."""
        return not self._parts and (self._last.startswith(self._dialect.ends) or self._last.endswith(self._dialect.ends))

    async def _more(self) -> None:
        """Waits for an event, the end, or for the client to leave."""
        self._news.clear()
        await self._news.wait()

    def _silent(self) -> None:
        """Keeps the connection open if nothing was taken for a whole interval, and sets the timer for the next check."""
        due = self._taken_at + KEEP_ALIVE_S
        if due <= self._loop.time():
            # If events wait, the client does not read, and a comment would not help.
            if not self._parts and not self._ended:
                self._parts.append(self._dialect.silent if self._last else self._dialect.waiting)
                self._news.set()
            due = self._loop.time() + KEEP_ALIVE_S
        self._timer = self._loop.call_at(due, self._silent)
