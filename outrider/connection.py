"""HTTP requests to a fleet's gateway, with retries.  Runs in the caller's event loop."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider.process import FleetProcess
from outrider.types import OutriderError

RETRIED = frozenset({429, 502, 503, 504})
FULL = frozenset({"overloaded", "rate_limit_exceeded"})
"""Codes of a fleet that works, but has no room for the request, or whose key has used up its quota of this minute."""
LONGEST_WAIT_S = 30.0
CONNECT_S = 10.0
"""Seconds for connecting.  Answers have no time limit."""


def is_here(url: str) -> bool:
    """Whether a gateway is on this machine, or not known yet: a proxy for the world outside knows nothing of it."""
    return urlsplit(url).hostname in (None, "localhost", "127.0.0.1", "::1")


class Connection:
    """The connection to one gateway.  `concurrency` bounds the requests at a time, `retries` how often one is sent again.

    A request for which there is no room yet is sent until there is: long outputs may occupy the verifiers for hours.
    """

    def __init__(
        self, url: str, api_key: str | None, concurrency: int, retries: int, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        self.url = url
        self.process: FleetProcess | None = None
        """The fleet, if it is a child of this process."""
        self._retries = retries
        self._slots = asyncio.Semaphore(concurrency)
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            # httpx looks at every idle connection for each request.  With 128 connections, a request took 30 ms of a core.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            transport=transport,
            trust_env=not is_here(url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send_in_turn(self, path: str, body: object, session: str | None = None) -> Any:
        """Sends a POST request; at most `concurrency` of them are sent at a time."""
        async with self._slots:
            return await self.send("POST", path, body, session)

    async def send(self, method: str, path: str, body: object = None, session: str | None = None) -> Any:
        """Sends a request and returns the answer's JSON.  Raises `OutriderError`.

        Every request may be repeated: samples are independent of each other, and all other requests only set a state.
        """
        headers = {"X-Session-ID": session} if session else {}
        attempt = 0
        while True:
            wait_s = min(0.25 * 2 ** min(attempt, 16), LONGEST_WAIT_S)
            try:
                answer = await self._http.request(method, self.url + path, json=body, headers=headers)
            except httpx.TransportError as error:
                if self.process is not None and self.process.ended:
                    raise OutriderError(0, "fleet_ended", f"the fleet has ended:\n{self.process.tail}") from error
                if attempt >= self._retries:
                    raise OutriderError(0, "no_answer", f"{method} {path}: {error or type(error).__name__}") from error
            else:
                if answer.is_success:
                    return answer.json()
                final = answer.status_code not in RETRIED or answer.headers.get("x-should-retry") == "false"
                refused = _error(answer)
                full = refused.code in FULL
                if final or (attempt >= self._retries and not full):
                    raise refused
                wait_s = _retry_after_s(answer, wait_s)
                attempt -= full
            await asyncio.sleep(wait_s)
            attempt += 1


def _error(answer: httpx.Response) -> OutriderError:
    try:
        error = answer.json()["error"]
        return OutriderError(answer.status_code, error.get("code"), error["message"])
    except (ValueError, KeyError, TypeError):
        return OutriderError(answer.status_code, None, answer.text[:500])


def _retry_after_s(answer: httpx.Response, otherwise: float) -> float:
    try:
        return min(float(answer.headers["retry-after"]), LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return otherwise
