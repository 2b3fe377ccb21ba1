"""Half an hour at four fifths of what the fleet carries, with ten thousand clients that leave.  `SOAK_S=300` makes it shorter.

Nothing may be left afterwards: no request, no sequence, no place, and no memory to speak of.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import time
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest

from tests.support.fleet_process import ServedFleet, wait_for

SOAK_S = float(os.environ.get("SOAK_S", "1800"))
LEAVING_PER_S = 10_000 / 1800
LOAD = 0.8
WARM_S = min(360.0, SOAK_S / 2)
"""Before memory is first looked at: allocators, the cache of keys and values, and that of grammars fill."""
DRIFT = 0.05

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(int(SOAK_S) + 300)]


def body(rng: random.Random) -> dict[str, Any]:
    """What clients ask: short and longer, streamed or not, some with a grammar, some wrong."""
    request: dict[str, Any] = {
        "model": "demo",
        "prompt": "def f" + "x" * rng.randrange(40) + "(",
        "max_tokens": rng.choice((2, 8, 16, 32)),
        "stream": rng.random() < 0.7,
        "n": rng.choice((1, 1, 1, 2)),
    }
    kind = rng.random()
    if kind < 0.03:
        request["structured_outputs"] = {"choice": [f"v{rng.randrange(50)}", "w"]}
    elif kind < 0.04:
        request["structured_outputs"] = {
            "json": {"type": "object", "properties": {f"p{i}": {} for i in range(600)}, "x": rng.random()}
        }
    elif kind < 0.06:
        request["temperature"] = -1
    return request


class Clients:
    """One connection per request."""

    def __init__(self, url: str) -> None:
        where = httpx.URL(url)
        self._host, self._port = where.host, where.port
        self.ends: Counter[str] = Counter()
        self._rng = random.Random(1)

    async def one(self, leaves: bool) -> None:
        content = json.dumps(body(self._rng)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
        message = f"{head}content-type: application/json\r\n\r\n".encode() + content
        if leaves and self._rng.random() < 0.1:
            message = message[: self._rng.randrange(len(message))]
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(message)
            await writer.drain()
            if leaves:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1 << 16), self._rng.expovariate(10))
                self.ends["left"] += 1
                return
            answer = await asyncio.wait_for(reader.read(), 60)
            self.ends[answer[9:12].decode() or "nothing"] += 1
            if answer[9:12] == b"200" and (error := re.search(rb'"error":\s*{[^}]*}', answer)):
                self.ends[error[0].decode()] += 1
        finally:
            writer.transport.abort()

    async def capacity(self, seconds: float) -> float:
        """Requests per second that 32 clients get answered."""
        until, before = time.monotonic() + seconds, sum(self.ends.values())

        async def client() -> None:
            while time.monotonic() < until:
                await self.one(False)

        await asyncio.gather(*(client() for _ in range(32)))
        return (sum(self.ends.values()) - before) / seconds

    async def load(self, rate: float, leaving: float, seconds: float) -> None:
        """Requests at `rate` per second, whatever becomes of them; of these the share `leaving` is not waited for."""
        began, sent, running = time.monotonic(), 0, set()
        while (elapsed := time.monotonic() - began) < seconds:
            while sent < elapsed * rate:
                sent += 1
                task = asyncio.ensure_future(self.one(self._rng.random() < leaving))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.01)
        await asyncio.gather(*running, return_exceptions=True)


def resident_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / (1 << 20))


def test_nothing_is_left() -> None:
    # Of the 512 MiB of compiled grammars that vLLM keeps, a soak would see the filling.
    with ServedFleet("--mode", "off", "--drafters", "0", env={"VLLM_XGRAMMAR_CACHE_MB": "32"}) as fleet:
        (verifier,) = fleet.fleet()["verifiers"]
        pids = {"gateway": fleet.process.pid, "verifier": verifier["pid"]}
        clients = Clients(fleet.url)
        capacity = asyncio.run(clients.capacity(20.0))
        rate, leaving = LOAD * capacity, min(0.9, LEAVING_PER_S / (LOAD * capacity))
        # Who leaves costs less than who stays: the load is what is answered.
        rate += LEAVING_PER_S / 2
        asyncio.run(clients.load(rate, leaving, WARM_S))
        before = {name: resident_mib(pid) for name, pid in pids.items()}
        asyncio.run(clients.load(rate, leaving, SOAK_S - WARM_S))
        wait_for(lambda: fleet.metric("outrider_requests_in_flight") == 0, 60, "no request in flight")
        wait_for(
            lambda: fleet.metric("outrider_verifier_running") == fleet.metric("outrider_verifier_waiting") == 0,
            30,
            "no sequence",
        )
        after = {name: resident_mib(pid) for name, pid in pids.items()}
        drift = {name: after[name] / before[name] - 1 for name in pids}
        print(f"\n{capacity:.0f} requests/s at most, {rate:.0f} sent; {dict(clients.ends)}; MiB {before} to {after}, {drift=}")
        assert clients.ends["left"] >= 0.8 * LEAVING_PER_S * SOAK_S
        assert clients.ends.keys() <= {"200", "400", "left"}
        assert fleet.metric("outrider_client_disconnects_total") > 0
        assert fleet.metric("outrider_sequences_without_verifier") == 0
        assert not [line for line in fleet.output if "Traceback" in line]
        assert max(drift.values()) < DRIFT, drift
        # A whole set of places is free again.
        assert fleet.complete("def f(", max_tokens=2)["choices"]
