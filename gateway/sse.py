"""Server-sent events as clients expect them: a stream's events, from whoever makes them, to the connection.

A `Dialect` says how an API writes errors and ends its streams.  Between events there are only comments, which keep idle
connections open.  The response is held back until the first event, so that a request that cannot be served gets its HTTP
status; when that takes longer than the keep-alive interval the stream begins with a comment instead.

Whoever makes events puts them into a buffer and never waits; the connection's task takes all there are and writes them at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError, from_vllm, translate

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_S = 15.0
"""A stream that was silent for so long gets that comment: proxies close what looks dead."""
HEADERS = {"cache-control": "no-store", "connection": "keep-alive", "x-accel-buffering": "no"}
_ERROR_PREFIX = 'data: {"error"'

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialect:
    """An API's way to stream: `failed` makes all that ends a stream with an error, `ends` begins its last event."""

    failed: Callable[[ApiError], bytes]
    ends: tuple[bytes, ...]


CHAT = Dialect(lambda error: event(error.body()) + DONE, (DONE,))
"""Chat completions and completions: `data: {json}`, last `data: [DONE]`."""

MESSAGES = Dialect(lambda error: event(error.anthropic_body(), "error"), (b"event: message_stop", b"event: error"))
"""Anthropic's messages: every event is named."""


def event(body: object, name: str | None = None) -> bytes:
    """One event with `body` as JSON."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class ClientGone(Exception):
    """The client closed its connection before there was anything to send."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`; cancels it and raises `ClientGone` when the client leaves first.  The body must have been read."""
    # In a task of its own: vLLM makes an answer of a cancellation, and our own caller's would be lost.
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events:
    """Events on their way: put in by whoever makes them, taken out by the connection's task."""

    def __init__(self) -> None:
        self.ended = False
        self.error: ApiError | None = None
        self.last = b""
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._waiting: asyncio.Future[None] | None = None
        self._taken_at = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._silent)

    def put(self, events: bytes) -> None:
        """Some whole events; nothing after the end."""
        if not self.ended:
            self._parts.append(events)
            self.last = events
            self.wake()

    def end(self, error: Exception | None = None) -> None:
        """There are no more, because all was said or because of `error`."""
        if self.ended:
            return
        self.ended = True
        if error is not None:
            self.error = translate(error)
            if self.error.status == 500:
                logger.error("a stream failed: %s", type(error).__name__)
        self.wake()

    def wake(self) -> None:
        """Has whoever waits look again."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def empty(self) -> bool:
        return not self._parts

    def take(self) -> bytes:
        """All there are."""
        self._taken_at = self._loop.time()
        parts = self._parts
        if len(parts) == 1:
            return parts.pop()
        events = b"".join(parts)
        parts.clear()
        return events

    async def more(self) -> None:
        """Waits for an event, the end, or a `wake`."""
        self._waiting = self._loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def close(self) -> None:
        """Stops the clock of the comments."""
        self._timer.cancel()

    def _silent(self) -> None:
        """A comment when nothing was taken for a whole interval; looks again when that may next be so."""
        due = self._taken_at + KEEP_ALIVE_S
        if due <= self._loop.time():
            # One that waits already is enough for a client that takes nothing.
            if not self._parts:
                self.put(KEEP_ALIVE)
            due = self._loop.time() + KEEP_ALIVE_S
        self._timer = self._loop.call_at(due, self._silent)


class Source(Protocol):
    """Where events come from."""

    async def start(self, events: Events) -> None:
        """Begins to put events; raises what keeps it from it."""
        ...

    async def close(self) -> None:
        """Whatever it still does is in vain."""
        ...


class Generated:
    """The strings that vLLM's serving layer yields."""

    def __init__(self, chunks: AsyncGenerator[str, None]) -> None:
        self._chunks = chunks
        self._task: asyncio.Task[None] | None = None

    async def start(self, events: Events) -> None:
        self._task = asyncio.create_task(self._pump(events))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _pump(self, events: Events) -> None:
        try:
            async for chunk in self._chunks:
                if chunk.startswith(_ERROR_PREFIX):
                    raise from_vllm(json.loads(chunk.removeprefix("data: "))["error"])
                events.put(chunk.encode())
            events.end()
        except Exception as error:
            events.end(error)
        finally:
            await self._chunks.aclose()


async def stream_response(request: Request, source: Source, dialect: Dialect, on_disconnect: Callable[[], None]) -> EventStream:
    """The streaming response for a source's events; raises `ApiError` when there is an error before any of them."""
    events = Events()
    leaving = asyncio.ensure_future(_disconnect(request))
    leaving.add_done_callback(lambda _: events.wake())
    stream = EventStream(source, events, dialect, leaving, on_disconnect)
    try:
        await source.start(events)
        while events.empty and not events.ended:
            if leaving.done():
                raise ClientGone
            await events.more()
        if events.empty and events.error is not None:
            raise events.error
    except Exception as error:
        await stream.close()
        if isinstance(error, ClientGone):
            raise
        raise translate(error) from None
    except BaseException:
        await stream.close()
        raise
    return stream


class EventStream(Response):
    """What there is is written at once, in one piece."""

    media_type = "text/event-stream"

    def __init__(
        self,
        source: Source,
        events: Events,
        dialect: Dialect,
        leaving: asyncio.Future[None],
        on_disconnect: Callable[[], None],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._source = source
        self._events = events
        self._dialect = dialect
        self._leaving = leaving
        self._on_disconnect = on_disconnect

    async def close(self) -> None:
        """Ends the source."""
        self._events.close()
        self._leaving.cancel()
        await self._source.close()

    def _said_all(self) -> bool:
        """Whether the last event has been taken."""
        last, ends = self._events.last, self._dialect.ends
        return self._events.empty and (last.startswith(ends) or last.endswith(ends))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, leaving = self._events, self._leaving
        complete = False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not events.ended and not leaving.done():
                if events.empty:
                    await events.more()
                    continue
                await send({"type": "http.response.body", "body": events.take(), "more_body": True})
                # Whoever has read the last event may go before the source has cleared up.
                complete = self._said_all() and not leaving.done()
            if not leaving.done():
                rest = events.take()
                if events.error is not None:
                    rest += self._dialect.failed(events.error)
                await send({"type": "http.response.body", "body": rest, "more_body": False})
                # `send` waits for a client that reads nothing, and returns when that one is gone.
                complete = not leaving.done()
            if not complete:
                self._on_disconnect()
        finally:
            await self.close()
