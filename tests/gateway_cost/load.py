"""The clients: raw HTTP/1.1 over asyncio, as little work as possible."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from tests.gateway_cost.engine import PacedVerifier

CONTENT = b'"content":"'


class Server(NamedTuple):
    """A front process, and the verifier that it serves from."""

    url: str
    pid: int
    verifier: PacedVerifier

    @property
    def cpu_s(self) -> float:
        """CPU time of the process and all its threads, as clock_getcpuclockid(3) names its clock."""
        return time.clock_gettime((~self.pid << 3) | 2)

    @property
    def resident_mib(self) -> float:
        return float(psutil.Process(self.pid).memory_info().rss / (1 << 20))


class Client(asyncio.Protocol):
    """One connection that asks the same again and again, or once."""

    def __init__(self, request: bytes, again: bool, emitted_at: dict[bytes, float]) -> None:
        self._request = request
        self._again = again
        self._emitted_at = emitted_at
        self._rest = b""
        self.done = 0
        """Answers, or chunks."""
        self.delays: list[float] = []
        self.failed = self.last = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._sent_at = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.last = data
        if self._again:
            self._rest += data
            if self._rest.endswith((b"}", b"\r\n0\r\n\r\n")):
                self.done += 1
                if b" 200 OK" not in self._rest[:20]:
                    self.failed = self._rest
                self.delays.append(now - self._sent_at)
                self._rest, self._sent_at = b"", now
                self.transport.write(self._request)
            return
        # Events are never split here: each is written at once, and is far smaller than a segment of the loopback.
        for event in data.split(b"\n\n"):
            at = event.find(CONTENT)
            if at < 0:
                if b" 200 OK" not in event and b"event-stream" not in event and event.startswith(b"HTTP"):
                    self.failed = event
                continue
            word = event[at + len(CONTENT) : event.index(b'"', at + len(CONTENT))]
            if word:
                self.done += 1
                # A server that falls behind puts tokens together.
                if (emitted_at := self._emitted_at.get(word)) is not None:
                    self.delays.append(now - emitted_at)


async def streams(server: Server, count: int, seconds: float) -> dict[str, float]:
    """`count` streams that all run while it is measured."""
    return await _measure(server, await _open(server, count, stream=True), seconds)


async def requests(server: Server, count: int, seconds: float, stream: bool) -> dict[str, float]:
    """One-token requests, one after the other on each of `count` connections."""
    return await _measure(server, await _open(server, count, stream, max_tokens=1), seconds)


async def idle(server: Server, count: int, seconds: float) -> dict[str, float]:
    """`count` streams on which nothing comes but comments, held for a while after each has had one."""
    before, began, cpu = server.resident_mib, time.monotonic(), server.cpu_s
    clients = await _open(server, count, stream=True)
    opened = time.monotonic() - began
    await _begun(clients, lambda client: b"keep-alive" in client.last)
    opening, held, cpu = server.cpu_s - cpu, time.monotonic(), server.cpu_s
    await asyncio.sleep(seconds)
    share = (server.cpu_s - cpu) / (time.monotonic() - held)
    memory = {"mib_before": before, "mib": server.resident_mib}
    alive = sum(not client.transport.is_closing() and not client.failed for client in clients)
    for client in clients:
        client.transport.abort()
    return {"alive": alive, "opened_in_s": opened, "opening_ms_each": opening / count * 1e3, "core": share, **memory}


async def _open(server: Server, count: int, stream: bool, max_tokens: int = 3000) -> list[Client]:
    messages = [{"role": "user", "content": "def read_lines(path):\n    " * 8}]
    fields = {"model": "bench", "messages": messages, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
    body, address = json.dumps(fields), urlsplit(server.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    clients = [Client(request, max_tokens == 1, server.verifier.emitted_at) for _ in range(count)]
    for each in clients:
        await asyncio.get_running_loop().create_connection(lambda each=each: each, str(address.hostname), address.port or 80)  # type: ignore[misc]
    return clients


async def _begun(clients: list[Client], has: Callable[[Client], bool]) -> None:
    deadline = time.monotonic() + 60
    while not all(has(client) or client.failed for client in clients):
        await asyncio.sleep(0.05)
        if time.monotonic() > deadline:
            late = [client for client in clients if not has(client)]
            raise RuntimeError(f"{len(late)} of {len(clients)} clients got nothing; one has {late[0].last[-500:]!r}")


async def _measure(server: Server, clients: list[Client], seconds: float) -> dict[str, float]:
    await _begun(clients, lambda client: client.done > 2)
    for client in clients:
        client.delays.clear()
    before, cpu, began = sum(client.done for client in clients), server.cpu_s, time.monotonic()
    await asyncio.sleep(seconds)
    cpu, wall = server.cpu_s - cpu, time.monotonic() - began
    done = sum(client.done for client in clients) - before
    delays = sorted(delay for client in clients for delay in client.delays) or [0.0]
    for client in clients:
        if client.failed:
            raise RuntimeError(client.failed.decode())
        client.transport.abort()
    await asyncio.sleep(0.5)
    return {
        "us": cpu / done * 1e6,
        "per_s": done / wall,
        "core": cpu / wall,
        "p50_ms": statistics.median(delays) * 1e3,
        "p99_ms": delays[int(len(delays) * 0.99)] * 1e3,
    }
