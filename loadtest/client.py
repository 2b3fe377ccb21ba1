"""Makes one request and times it.  Blocking; under Locust the sockets are gevent's.

The body is read with `read1`, which returns what one read of the socket gave.  Reading in blocks (`iter_content` with a size,
geventhttpclient's iterator) waits until a block is full, so early chunks would get late times.  Clients share no connections.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import requests
import urllib3

from loadtest.served import session
from loadtest.sse import SseParser
from loadtest.timing import Answer, StreamReader, error_code, is_clean_error
from loadtest.workloads import Ask

READ_BYTES = 1 << 16
OVERLOADED = (429, 503)


class Client:
    """Requests to one gateway, one after the other."""

    def __init__(self, host: str, api_key: str | None, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._session = session(api_key)

    def close(self) -> None:
        self._session.close()

    def ask(self, ask: Ask, user: int, number: int) -> Answer:
        """Makes one request.  Faults of the server or the connection are in the answer and raise nothing."""
        answer = Answer(ask.label, user, number, self._clock())
        body = ask.raw if ask.raw is not None else json.dumps(ask.body).encode()
        headers = {"content-type": ask.content_type}
        try:
            with self._session.post(
                self._host + ask.path, data=body, headers=headers, stream=True, timeout=self._timeout_s
            ) as response:
                answer.status = response.status_code
                if ask.expect_status != 200 or response.status_code != 200:
                    return self._refused(ask, answer, response)
                return self._read(ask, StreamReader(answer), response)
        except requests.RequestException as error:
            answer.ended = self._clock()
            answer.reason = answer.reason or f"no answer: {type(error).__name__}"
            return answer

    def _read(self, ask: Ask, reader: StreamReader, response: requests.Response) -> Answer:
        parser = SseParser()
        kind = response.headers.get("content-type", "").partition(";")[0]
        if kind != "text/event-stream":
            return reader.end(self._clock(), f"content type {kind or 'missing'}")
        try:
            while received := response.raw.read1(READ_BYTES, decode_content=True):
                now = self._clock()
                reader.answer.size += len(received)
                reader.take(parser.feed(received), now)
                if ask.abort_after is not None and len(reader.answer.chunks) >= ask.abort_after and not reader.done:
                    # Closed without reading the rest, so that the server sees the client disconnect.
                    response.close()
                    return reader.abort(self._clock())
        except (urllib3.exceptions.HTTPError, OSError, UnicodeDecodeError) as error:
            return reader.end(self._clock(), f"broken off: {type(error).__name__}")
        return reader.end(self._clock(), "an unfinished event" if parser.unfinished else "")

    def _refused(self, ask: Ask, answer: Answer, response: requests.Response) -> Answer:
        """Judges an error response, expected or not."""
        content, status = response.content, response.status_code
        answer.ended, answer.size = self._clock(), len(content)
        try:
            body: Any = json.loads(content)
        except ValueError:
            body = None
        if status == ask.expect_status and is_clean_error(body):
            answer.outcome = "ok"
        elif status in OVERLOADED and is_clean_error(body) and "retry-after" in response.headers:
            answer.outcome, answer.reason = "rejected", f"{status} {error_code(body)}"
        elif status == ask.expect_status:
            answer.reason = f"{status}, but not as an OpenAI error"
        else:
            answer.reason = f"{status} {error_code(body)}, not {ask.expect_status}"
        return answer
