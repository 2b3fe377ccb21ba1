"""A whole gateway on a free port, in the test's own event loop or in a process of its own, in front of fake verifiers."""

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from backend.config import Settings
from backend.models.demo import TARGET_DIR
from gateway.auth.key_ring import make_key
from gateway.http.server import GatewayServer
from gateway.peers import Peers
from tests.support.fake_verifier import FakeVerifier, StaticDirectory, eventually
from tests.support.fleet_process import metric

MODEL_DIR = str(TARGET_DIR)
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "def f(", "max_tokens": 6}
RESPONSE: dict[str, Any] = {"model": "demo", "input": "hi", "max_output_tokens": 6}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/v1/messages": CHAT, "/v1/responses": RESPONSE}
"""What routes that generate are asked."""


@dataclass
class Running:
    server: GatewayServer
    directory: StaticDirectory
    verifiers: list[Any]
    http: httpx.AsyncClient
    stopped: asyncio.Task[None]
    begun: list[asyncio.Task[httpx.Response]] = field(default_factory=list)

    def begin(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any
    ) -> asyncio.Task[httpx.Response]:
        """A request that goes on beside the test.  When the test ends its client leaves."""
        post = self.http.post(path, json={**BODIES[path], **fields}, headers=headers)
        self.begun.append(asyncio.ensure_future(post))
        return self.begun[-1]

    async def leave(self) -> None:
        """The clients of all requests that go on leave."""
        for each in self.begun:
            each.cancel()
        await asyncio.gather(*self.begun, return_exceptions=True)
        self.begun.clear()

    @cached_property
    def client(self) -> AsyncOpenAI:
        """OpenAI's client."""
        return AsyncOpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        """Anthropic's client."""
        return AsyncAnthropic(base_url=self.server.url, api_key="none", max_retries=0)

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
    def prompt(self) -> str:
        """The text of the last prompt that the first verifier got."""
        tokenizer = self.server.gateway.client.renderer.tokenizer
        return str(tokenizer.decode(self.verifier.sequences[-1].request.prompt_token_ids))

    @property
    def idle(self) -> bool:
        """Whether no request is left in the gateway or in vLLM's output processor."""
        return not self.core.sequences and not self.server.gateway.client.output_processor.request_states

    def another(self, name: str, **fields: Any) -> FakeVerifier:
        """One more verifier, which the directory does not know yet; it ends with the gateway."""
        folder = Path(self.verifier.address.removeprefix("ipc://")).parent
        self.verifiers.append(FakeVerifier(folder, name, **fields).start())
        return self.verifiers[-1]

    async def until_idle(self) -> None:
        """Nothing is left of any request, nor of its place."""
        await eventually(lambda: self.idle and self.server.gateway.metrics.in_flight == 0)

    async def until_emitted(self, sequences: int = 1) -> None:
        """So many sequences have emitted tokens."""
        await eventually(lambda: sum(bool(each.emitted) for each in self.core.sequences) == sequences)

    async def metric(self, name: str, **labels: str) -> float:
        return metric((await self.http.get("/metrics")).text, name, **labels)


@asynccontextmanager
async def running_gateway(
    verifiers: int = 1,
    mode: str = "sync",
    tracing: dict[str, Any] | None = None,
    slots: int = 64,
    read_settings: Any = None,
    peers: Peers | None = None,
    engine_args: dict[str, Any] | None = None,
    adapters_loadable: bool = False,
    **gateway: Any,
) -> AsyncIterator[Running]:
    """A gateway with `gateway` settings and `verifiers` connected fake verifiers, each of which runs `slots` sequences."""
    with tempfile.TemporaryDirectory() as folder:
        fakes = [FakeVerifier(Path(folder), f"verifier-{index}").start() for index in range(verifiers)]
        directory = StaticDirectory([fake.member for fake in fakes])
        gateway = {"port": 0, "state_dir": folder, **gateway}
        verifier = {"max_num_seqs": slots, "engine_args": engine_args or {}, "adapters_loadable": adapters_loadable}
        sections = {"gateway": gateway, "tracing": tracing or {}, "verifier": verifier}
        settings = Settings.model_validate({"mode": mode, **sections})
        server = GatewayServer(settings, directory, MODEL_DIR, model_name="demo", read_settings=read_settings, peers=peers)
        try:
            async with serving(server, verifiers) as (http, task):
                running = Running(server, directory, fakes, http, task)
                try:
                    yield running
                finally:
                    await running.leave()
        finally:
            for fake in fakes:
                fake.close()


@asynccontextmanager
async def serving(server: GatewayServer, verifiers: int) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[None]]]:
    """Serves in a task of its own, and gives a client once so many verifiers are connected.  It hears of members at once."""
    with mock.patch("gateway.fleet.directory.POLL_INTERVAL_S", 0.02):
        task = asyncio.create_task(server.serve())
        try:
            await eventually(lambda: server._server.started and len(server.gateway.client.core.ready_links) == verifiers)
            async with httpx.AsyncClient(base_url=server.url, timeout=300, verify=False) as http:
                yield http, task
        finally:
            # The second call ends what is still open.
            server.stop()
            server.stop()
            await task


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """The status, and the error's code or else its field."""
    error = answer.json()["error"]
    return answer.status_code, error["code"] or error["param"]


def heard(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream of any API."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def events(raw: bytes) -> list[dict[str, Any]]:
    """The stream's JSON events; checks the framing byte by byte."""
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")
    blocks = raw.replace(b": keep-alive\n", b"")[:-2].split(b"\n\n")
    data = []
    for block in blocks:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        data.append(block.removeprefix(b"data: "))
    assert data[-1] == b"[DONE]"
    assert data.count(b"[DONE]") == 1
    return [json.loads(each) for each in data[:-1]]


def gateway_process(job: dict[str, Any], pipe: Connection) -> None:
    """The main function of a gateway's process, with the job's `members` and settings (default: none); a signal ends it."""
    settings = Settings.model_validate({"verifier": job.get("verifier", {}), "gateway": {"port": 0, **job.get("gateway", {})}})
    server = GatewayServer(settings, StaticDirectory(job.get("members", ())), job["model"])

    log = logging.getLogger("gateway.http.server")
    log.setLevel(logging.INFO)

    def tell(record: logging.LogRecord) -> bool:
        if record.msg == "listening on %s":
            pipe.send(server.url)
        return True

    log.addFilter(tell)
    server.run()


class Keys:
    """Keys by name, and the file that has them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.yaml"
        self._entries: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    def put(self, name: str, **fields: Any) -> dict[str, str]:
        """Writes a key with these fields; returns the headers that present it."""
        if name not in self._keys:
            self._keys[name], self._entries[name] = make_key(name)
        entry = self._entries[name] + "".join(f"    {field}: {json.dumps(value)}\n" for field, value in fields.items())
        self._entries[name] = entry
        self.file.write_text("keys:\n" + "".join(self._entries.values()))
        return {"authorization": f"Bearer {self._keys[name]}"}
