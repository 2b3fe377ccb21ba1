"""A whole gateway on a free port, in the test's own event loop, in front of fake verifiers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

import backend.models.demo
from backend.config import Settings
from gateway.http.server import GatewayServer
from tests.support.fake_verifier import FakeVerifier, eventually
from tests.support.static_directory import StaticDirectory

MODEL_DIR = str(Path(backend.models.demo.__file__).parent / "target")
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "def f(", "max_tokens": 6}


@dataclass
class Running:
    server: GatewayServer
    directory: StaticDirectory
    verifiers: list[FakeVerifier]
    http: httpx.AsyncClient
    stopped: asyncio.Task[None]

    @property
    def verifier(self) -> FakeVerifier:
        return self.verifiers[0]

    @property
    def core(self) -> Any:
        return self.server.gateway.client.core

    @property
    def uvicorn(self) -> Any:
        return self.server._server

    @property
    def idle(self) -> bool:
        """Whether no request is left in the gateway or in vLLM's output processor."""
        return not self.core.sequences and not self.server.gateway.client.output_processor.request_states

    async def metric(self, name: str) -> float:
        return await metric(self.http, name)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """The sum of the samples whose name, or name and first labels, this is."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{", f"{name},", f"{name}}}")))


@asynccontextmanager
async def running_gateway(
    verifiers: int = 1,
    mode: str = "sync",
    tracing: dict[str, Any] | None = None,
    slots: int = 64,
    read_settings: Any = None,
    **gateway: Any,
) -> AsyncIterator[Running]:
    """A gateway with `gateway` settings and `verifiers` connected fake verifiers, each of which runs `slots` sequences."""
    with tempfile.TemporaryDirectory() as folder:
        fakes = [FakeVerifier(Path(folder), f"verifier-{index}").start() for index in range(verifiers)]
        directory = StaticDirectory([fake.member for fake in fakes])
        gateway = {"port": 0, "state_dir": folder, **gateway}
        sections = {"gateway": gateway, "tracing": tracing or {}, "verifier": {"max_num_seqs": slots}}
        settings = Settings.model_validate({"mode": mode, **sections})
        server = GatewayServer(settings, directory, MODEL_DIR, model_name="demo", read_settings=read_settings)
        try:
            async with serving(server, verifiers) as (http, task):
                yield Running(server, directory, fakes, http, task)
        finally:
            for fake in fakes:
                fake.close()


@asynccontextmanager
async def serving(server: GatewayServer, verifiers: int) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """Serves in a task of its own, and gives a client once so many verifiers are connected.  It hears of members at once."""
    with mock.patch("gateway.fleet.directory.POLL_INTERVAL_S", 0.02):
        task = asyncio.create_task(server.serve())
        try:
            await eventually(lambda: server.url != "" and len(server.gateway.client.core.ready_links) == verifiers, 60)
            async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False) as http:
                yield http, task
        finally:
            # The second call ends what is still open.
            server.stop()
            server.stop()
            await task
