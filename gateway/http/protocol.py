"""uvicorn's HTTP/1.1 protocol with bounds on connections, on what comes before the body, and on clients that take no answer.

uvicorn has no such bounds with httptools.  If a request offers to change the protocol, as Java's HTTP client does by default
(`Upgrade: h2c`), uvicorn drops its body, or takes the body for the next request.  A server may ignore such an offer, and this
one does.  Errors have the usual JSON format, and end the connection.
"""

import asyncio
import json
import resource
import sys
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.http.errors import (
    ApiError,
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    RequestTimeout,
    TooManyConnections,
    UriTooLong,
)

MAX_URL_BYTES = 8192
MAX_HEADERS = 100
MAX_HEADER_BYTES = 65536
"""Names and values of all headers together.  Other servers allow 8 to 64 KiB, cookies and trace headers included."""
HEAD_TIMEOUT_S = 20.0
"""Seconds from the first byte of a request to the end of its headers."""
WRITE_TIMEOUT_S = 60.0
"""Seconds in which a client must read something of an answer that waits for it."""
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = sys.maxsize if _OPEN_FILES == resource.RLIM_INFINITY else _OPEN_FILES * 3 // 4
"""Most connections of this process.  Each is an open file; verifiers, logs and the gateway's own files need the rest."""
LINGER_S = 1.0
"""Seconds in which the client of one connection too many may read the refusal."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection.  When a callback raises, httptools raises an error of its own, and uvicorn calls `send_400_response`.

    So callbacks refuse a request by raising an `ApiError`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._pending = 0
        self._late: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= MAX_CONNECTIONS:
            # uvicorn sets this timer only after an answer.
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            return
        # Its request is not read.  Were the connection closed at once, the kernel would reset it before the answer is read.
        transport.pause_reading()
        self._answer(TooManyConnections())
        self._late = self.loop.call_later(LINGER_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._pending += len(data)
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as offer:
                data = self._without_offer(data[offer.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
        if self.parser is None or self.transport.is_closing():
            return
        # httptools calls `on_header` only for complete headers, so incomplete ones are counted here; trailers too.
        if self._pending > MAX_URL_BYTES + MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"The request's headers are larger than {MAX_HEADER_BYTES} bytes."))
            return
        if self._late is None and not self._answering:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise UriTooLong(f"The request's URL is larger than {MAX_URL_BYTES} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"The request has more than {MAX_HEADERS} headers.")

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise MethodNotAllowed("This method is not allowed here.")
        self._in_head, self._pending = False, 0
        self._stop_waiting()
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            raise HeadersTooLarge(f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.")
        super().on_headers_complete()
        # Trailers are counted, but are no headers of the request.
        self.headers = self.headers.copy()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        cause = getattr(sys.exception(), "__context__", None)
        self._refuse(cause if isinstance(cause, ApiError) else BadRequest(msg, code="invalid_http"))

    def _should_upgrade(self) -> bool:
        # True: a request with an offer is not served until it is parsed again.
        return True

    def _without_offer(self, rest: bytes) -> bytes:
        """What to parse instead of a request with an offer: its head without the header `Upgrade`, and what came after it."""
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([*head, b"", rest])

    @property
    def _answering(self) -> bool:
        """Whether a request of this connection is being served.  Meanwhile no timer waits for the next request."""
        return self.cycle is not None and not self.cycle.response_complete

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self.transport.is_closing() or self._answering:
            return
        if self._in_head:
            self._refuse(RequestTimeout("The request's headers took too long to arrive."))
        else:
            self.transport.close()

    def _watch_reader(self, before: int | None) -> None:
        """Ends the connection when nothing was taken since there were `before` bytes to send; else looks again."""
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()
        else:
            self._reading = self.loop.call_later(WRITE_TIMEOUT_S, self._watch_reader, left)

    def _stop_watching(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _refuse(self, error: ApiError) -> None:
        # An answer that has begun is cut off: a second one would be taken for a part of it.
        if not (self._answering and (self.pipeline or self.cycle.response_started)):
            self._answer(error)
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        status = HTTPStatus(error.status)
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.headers()}
        head = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
