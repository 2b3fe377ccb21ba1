"""The clients: raw HTTP/1.1 over asyncio, as little work as possible.  Own process."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from tests.gateway_cost.engine import Emissions, words

CONTENT = b'"content":"'


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads, as clock_getcpuclockid(3) names its clock."""
    return time.clock_gettime((~pid << 3) | 2)


def resident_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / (1 << 20))


class Client(asyncio.Protocol):
    """One connection that asks the same again and again, or once."""

    def __init__(self, request: bytes, again: bool, words: dict[bytes, int], emissions: Emissions) -> None:
        self._request = request
        self._again = again
        self._words = words
        self._emissions = emissions
        self._rest = b""
        self.chunks = self.answers = 0
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
                self.answers += 1
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
                self.chunks += 1
                # A server that falls behind puts tokens together.
                if (step := self._words.get(word)) is not None:
                    self.delays.append(now - self._emissions[step])


class Load:
    """Loads one server after another."""

    def __init__(self, model: str, emissions: Path) -> None:
        self._words = {text.encode(): step for step, text in enumerate(words(model))}
        self._emissions = Emissions(emissions)

    async def streams(self, url: str, pid: int, count: int, seconds: float) -> dict[str, float]:
        """`count` streams that all run while it is measured."""
        body = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        clients = await self._open(url, count, body, again=False)
        await self._begun(clients, lambda client: client.chunks > 2)
        return await self._measure(clients, pid, seconds, lambda client: client.chunks)

    async def requests(self, url: str, pid: int, count: int, seconds: float, stream: bool) -> dict[str, float]:
        """One-token requests, one after the other on each of `count` connections."""
        clients = await self._open(url, count, {"stream": stream, "max_tokens": 1}, again=True)
        await self._begun(clients, lambda client: client.answers > 2)
        return await self._measure(clients, pid, seconds, lambda client: client.answers)

    async def idle(self, url: str, pid: int, count: int, seconds: float) -> dict[str, float]:
        """`count` streams on which nothing comes but comments, held for a while after each has had one."""
        body = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        before, began, cpu = resident_mib(pid), time.monotonic(), cpu_s(pid)
        clients = await self._open(url, count, body, again=False)
        opened = time.monotonic() - began
        await self._begun(clients, lambda client: b"keep-alive" in client.last)
        opening, held, cpu = cpu_s(pid) - cpu, time.monotonic(), cpu_s(pid)
        await asyncio.sleep(seconds)
        share = (cpu_s(pid) - cpu) / (time.monotonic() - held)
        memory = {"mib_before": before, "mib": resident_mib(pid)}
        alive = sum(not client.transport.is_closing() and not client.failed for client in clients)
        for client in clients:
            client.transport.abort()
        return {"alive": alive, "opened_in_s": opened, "opening_ms_each": opening / count * 1e3, "core": share, **memory}

    async def _open(self, url: str, count: int, fields: dict[str, Any], again: bool) -> list[Client]:
        content = "def read_lines(path):\n    " * 8
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": content}], **fields})
        address = urlsplit(url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        loop = asyncio.get_running_loop()
        clients = []
        for _ in range(count):
            client = Client(request, again, self._words, self._emissions)
            await loop.create_connection(lambda client=client: client, str(address.hostname), address.port or 80)  # type: ignore[misc]
            clients.append(client)
        return clients

    async def _begun(self, clients: list[Client], has: Callable[[Client], bool]) -> None:
        deadline = time.monotonic() + 60
        while not all(has(client) or client.failed for client in clients):
            await asyncio.sleep(0.05)
            if time.monotonic() > deadline:
                late = [client for client in clients if not has(client)]
                raise RuntimeError(f"{len(late)} of {len(clients)} clients got nothing; one has {late[0].last[-500:]!r}")

    async def _measure(self, clients: list[Client], pid: int, seconds: float, count: Any) -> dict[str, float]:
        for client in clients:
            client.delays.clear()
        before, cpu, began = sum(map(count, clients)), cpu_s(pid), time.monotonic()
        await asyncio.sleep(seconds)
        cpu, done, wall = cpu_s(pid) - cpu, sum(map(count, clients)) - before, time.monotonic() - began
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


def main(job: dict[str, Any], pipe: Connection) -> None:
    """A child's main: does what it is told, one thing after the other."""
    load = Load(job["model"], job["emissions"])
    pipe.send("ready")
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(uvloop.run(getattr(load, method)(**arguments)))
        except RuntimeError as error:
            pipe.send(error)
