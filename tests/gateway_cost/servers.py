"""The two front processes: this project's gateway, and vLLM's API server with a client of the same engine wire."""

import asyncio
import os
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import uvloop
import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import EngineCoreClient

from backend.engine.client import EngineCodec
from backend.transport.aio import AsyncDealer
from backend.transport.sockets import Wire


def gateway(job: dict[str, Any], pipe: Connection) -> None:
    """A child's main: a gateway with one verifier, until the pipe is closed."""
    from tests.support.running_gateway import gateway_process

    # Room for all, so that no stream waits at the gateway.
    settings = {"gateway": {"max_in_flight": 100_000, "served_model_name": "bench"}, "verifier": {"max_num_seqs": 2048}}
    _end_with(pipe)
    gateway_process({**settings, "model": job["model"], "members": [job["member"]]}, pipe)


def vllm_server(job: dict[str, Any], pipe: Connection) -> None:
    """A child's main: vLLM's API server as its command starts it, without logs and statistics, until the pipe is closed."""
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    line = ["--model", job["model"], "--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(job["port"])]
    line += ["--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "error"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    client = mock.patch.object(EngineCoreClient, "make_async_mp_client", return_value=_EngineOverTheWire(job["member"].address))
    pipe.send(f"http://127.0.0.1:{job['port']}")
    _end_with(pipe)
    with client:
        uvloop.run(run_server(arguments))


def _end_with(pipe: Connection) -> None:
    def watch() -> None:
        try:
            pipe.recv()
        except EOFError:
            os.kill(os.getpid(), 15)

    threading.Thread(target=watch, daemon=True).start()


class _EngineOverTheWire(EngineCoreClient):
    """What vLLM's own client does (a DEALER, msgpack, a queue), to an engine of the benchmark."""

    def __init__(self, address: str) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._address = address
        self._codec = EngineCodec()
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._dealer: AsyncDealer | None = None

    def _connected(self) -> AsyncDealer:
        if self._dealer is None:
            self._dealer = AsyncDealer(Wire(), self._address)
            self._dealer.send(self._codec.hello("vllm"))
            self._listening = asyncio.create_task(self._listen(self._dealer))
        return self._dealer

    async def _listen(self, dealer: AsyncDealer) -> None:
        while True:
            heard = self._codec.hear(await dealer.receive())
            if isinstance(heard, EngineCoreOutputs):
                self._outputs.put_nowait(heard)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def add_request_async(self, request: Any) -> None:
        self._connected().send(self._codec.add(request, request.request_id))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids:
            self._connected().send(self._codec.abort(request_ids))

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        self._connected()
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass
