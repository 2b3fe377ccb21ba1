"""Makes one request and times it.  Blocking; under Locust the sockets are gevent's.

httpx passes on what one read of the socket returned, so a chunk's time is its arrival.  Locust's `FastHttpUser` reads blocks of
one size and waits until a block is full, so early chunks would get late times.  Clients share no connections.
"""

import time
from collections.abc import Callable

import httpx

from loadtest.scenarios import LoadRequest
from loadtest.stream import StreamedAnswer, error_code

OVERLOADED = (429, 503)
REJECTED = "rejected: "
"""How the fault of a request begins that an overloaded server has refused properly, with Retry-After."""

TLS = httpx.create_ssl_context()
"""Made once, because it takes tens of milliseconds."""


class Client:
    """Requests to one gateway, one after the other.  Proxies and credentials in the environment are ignored."""

    def __init__(self, host: str, api_key: str | None, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=host, headers=headers, timeout=timeout_s, verify=TLS, trust_env=False)
        self._clock = clock

    def send(self, request: LoadRequest) -> StreamedAnswer:
        """Makes one request.  Faults of the server or the connection are in the answer and raise nothing."""
        answer = StreamedAnswer(self._clock())
        try:
            with self.http.stream("POST", request.path, json=request.body) as response:
                if fault := _fault(response):
                    answer.fail(fault)
                else:
                    for received in response.iter_bytes():
                        answer.feed(received, self._clock())
        except httpx.HTTPError as error:
            answer.fail(type(error).__name__)
        answer.end(self._clock())
        return answer


def _fault(response: httpx.Response) -> str:
    """Why this response is no stream; empty if it is one."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if response.status_code == 200:
        return "" if kind == "text/event-stream" else f"content type {kind or 'missing'}"
    response.read()
    try:
        body = response.json()
    except ValueError:
        body = None
    rejected = response.status_code in OVERLOADED and "retry-after" in response.headers
    return f"{REJECTED if rejected else ''}{response.status_code} {error_code(body)}"
