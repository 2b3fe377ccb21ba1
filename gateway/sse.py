"""Server-sent events as clients expect them, from what vLLM's serving layer yields.

A `Dialect` says how an API writes errors and ends its streams.  Between events there are only comments, which keep idle
connections open.  The response is held back until the first event, so that a request that cannot be served gets its HTTP
status; when that takes longer than the keep-alive interval the stream begins with a comment instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request

from gateway.errors import ApiError, from_vllm, translate

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_ERROR_PREFIX = 'data: {"error"'

logger = logging.getLogger(__name__)
# It logs every chunk at debug level, and chunks are outputs.
logging.getLogger("sse_starlette").setLevel(logging.INFO)


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


async def stream_response(
    request: Request,
    chunks: AsyncGenerator[str, None],
    dialect: Dialect,
    keep_alive_s: float,
    on_disconnect: Callable[[], None],
) -> EventSourceResponse:
    """The streaming response for `chunks`; raises `ApiError` when the very first of them is an error."""
    events = _events(chunks)
    first = asyncio.ensure_future(anext(events))
    try:
        await unless_disconnected(request, asyncio.wait((first,), timeout=keep_alive_s))
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    silence = _Silence(dialect.ends)

    async def left(message: object) -> None:
        # The server reports a disconnect after a complete answer too.
        if not silence.finished:
            on_disconnect()

    return EventSourceResponse(
        silence.watch(_after(first, events, dialect)),
        sep="\n",
        ping=keep_alive_s,
        ping_message_factory=silence.comment,
        client_close_handler_callable=left,
    )


class _Silence:
    """Whether anything was sent since the last ping was due."""

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        self._ends = ends
        self._sent = False
        self.finished = False

    async def watch(self, events: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        try:
            async for event in events:
                self._sent = True
                self.finished = event.startswith(self._ends) or event.endswith(self._ends)
                yield event
        finally:
            await events.aclose()

    def comment(self) -> ServerSentEvent:
        """A comment after a silent interval, else nothing."""
        sent, self._sent = self._sent, False
        return _NoEvent() if sent else ServerSentEvent(comment="keep-alive", sep="\n")


class _NoEvent(ServerSentEvent):
    """What a ping sends when there is no need for one."""

    def encode(self) -> bytes:
        return b""


async def _after(
    first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None], dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    """`first` and then the rest; an error that comes now can only be an event."""
    try:
        if not first.done():
            yield KEEP_ALIVE
        yield await first
        async for event in events:
            yield event
    except ApiError as error:
        yield dialect.failed(error)
    finally:
        if not first.done():
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await events.aclose()


async def _events(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[bytes, None]:
    """vLLM's chunks as bytes; raises `ApiError` in place of its error chunk."""
    try:
        async for chunk in chunks:
            if chunk.startswith(_ERROR_PREFIX):
                raise from_vllm(json.loads(chunk.removeprefix("data: "))["error"])
            yield chunk.encode()
    except Exception as error:
        known = translate(error)
        if known.status == 500:
            logger.error("a stream failed: %s", type(error).__name__)
        raise known from None
    finally:
        await chunks.aclose()
