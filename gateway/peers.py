"""Several gateway processes on one port: their messages to each other, and how the first process keeps the others running.

Each process listens on the port by itself (SO_REUSEPORT); Linux spreads connections over the processes by a hash of addresses.
Each also answers the other processes on a Unix socket, in a folder that only this user may enter.  One event loop per process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from backend.engine.front import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from gateway.errors import Unavailable
from gateway.pauses import Pauses
from gateway.reload import ReloadError
from gateway.state import Gateway

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0
LOOK_S = 0.1
BACKOFF_S = (0.5, 30.0)
"""Seconds before a process that died is started again: first and longest wait."""
LIVED_S = 60.0
"""After so many seconds of life, the wait is the shortest again."""
_SAMPLE = re.compile(r"^([^\s{]+)(?:\{(.*)\})? (\S+)$")

Command = Callable[[int, int], Sequence[str]]
"""Makes a process's command line from its number and the port."""


class Peers:
    """This process, number `index` of `count`, and the others.  Only the first has a `command`, and starts the others."""

    def __init__(
        self, folder: Path, index: int, count: int, *, port: int | None = None, command: Command | None = None
    ) -> None:
        self.port = port
        """The port to listen on; None in the first process, which uses the setting."""
        self._folder, self._index = folder, index
        self._others = [number for number in range(count) if number != index]
        self._command = command
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    @property
    def is_first(self) -> bool:
        return self._index == 0

    def start(self, gateway: Gateway, port: int) -> None:
        """Begins to answer the other processes.  The first process also starts them."""
        app = Starlette(
            routes=[
                Route("/ready", _ready),
                Route("/metrics", _metrics),
                Route("/reload/prepare", _prepare_reload, methods=["POST"]),
                Route("/reload/apply", _apply_reload, methods=["POST"]),
                Route("/cancel", _cancel, methods=["POST"]),
                Route("/abort", _abort, methods=["POST"]),
                Route("/adapters", _adapters, methods=["GET", "POST", "DELETE"]),
                Route("/pauses", _pauses, methods=["GET", "POST"]),
                Route("/update-number", _update_number, methods=["POST"]),
            ]
        )
        app.state.gateway = gateway
        config = uvicorn.Config(app, uds=str(self._path(self._index)), lifespan="off", log_config=None, access_log=False)
        self._server = uvicorn.Server(config)
        # Not `serve`, which would install its own signal handlers.
        self._serving = asyncio.create_task(self._server._serve(), name="peers")
        if self._command is not None:
            self._keepers = [asyncio.create_task(self._keep(number, port)) for number in self._others]

    def stop(self) -> None:
        """Has the processes that this one started drain.  A second call ends them at once."""
        self._stopping.set()
        for child in self._children.values():
            if child.returncode is None:
                child.terminate()

    async def close(self, patience_s: float) -> None:
        """Waits `patience_s` for the processes that this one started, then kills those left."""
        # A second SIGTERM would cut off requests that they still serve.
        if not self._stopping.is_set():
            self.stop()
        alive = [child for child in self._children.values() if child.returncode is None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(child.wait() for child in alive)), patience_s)
        for child in alive:
            if child.returncode is None:
                child.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)

    async def ready(self) -> bool:
        """Whether all other processes could serve a request now."""
        answers = await self._ask_all("GET", "/ready", timeout_s=READY_TIMEOUT_S)
        return len(answers) == len(self._others) and all(answer.status_code == 200 for answer in answers.values())

    async def wait_ready(self) -> None:
        while not await self.ready():
            await asyncio.sleep(LOOK_S)

    async def metrics(self, gateway: Gateway) -> str:
        """Every process's metrics, labelled by process, and the fleet's metrics as the first process sees them.

        Processes hear about the fleet at different moments: from several of them, counters would jump back between two scrapes.
        """
        texts = {number: answer.text for number, answer in (await self._ask_all("GET", "/metrics")).items()}
        texts[self._index] = exposed(gateway, fleet=self.is_first)
        return merged([texts[number] for number in sorted(texts)])

    async def prepare_reload(self) -> None:
        """Has all other processes read keys, limits and routing again.  Raises `ReloadError` when one refuses them."""
        # One that is being started reads the settings then.
        for number, answer in (await self._ask_all("POST", "/reload/prepare", timeout_s=6 * ASK_TIMEOUT_S)).items():
            if answer.status_code != 200:
                logger.error("reload refused by gateway process %d, nothing has changed: %s", number, answer.text)
                raise ReloadError(f"gateway process {number}: {answer.text}")

    async def apply_reload(self) -> None:
        """Has them put in force what they have read."""
        self._tell_of_others(await self._ask_all("POST", "/reload/apply"), "did not reload")

    async def adapters(self) -> list[dict[str, Any]]:
        """LoRA adapters that another process has loaded, as requests to load them."""
        answers = await self._ask_all("GET", "/adapters", timeout_s=READY_TIMEOUT_S)
        known: list[list[dict[str, Any]]] = [answer.json() for answer in answers.values()]
        return max(known, key=len, default=[])

    async def adapter(self, method: Literal["POST", "DELETE"], asked: dict[str, Any]) -> None:
        """Has all other processes load (POST) or unload (DELETE) a LoRA adapter, too."""
        # A process that is just starting asks for the adapters itself.
        answers = await self._ask_all(method, "/adapters", json=asked, timeout_s=6 * ASK_TIMEOUT_S)
        self._tell_of_others(answers, f"did not {'load' if method == 'POST' else 'unload'} {asked['lora_name']}")

    def _tell_of_others(self, answers: Mapping[int, httpx.Response], what: str) -> None:
        behind = [number for number in self._others if number not in answers or answers[number].status_code != 200]
        if behind:
            logger.error("gateway processes that %s: %s", what, ", ".join(map(str, behind)))

    async def cancel(self, response_id: str, owner: str) -> None:
        """Ends a background response that another process generates."""
        await self._ask_all("POST", "/cancel", params={"id": response_id, "owner": owner})

    async def abort(self, request_ids: list[str] | None, verifier: str | None) -> dict[str, list[list[int]]]:
        """Ends requests of the other processes; the tokens they had."""
        answers = await self._ask_all("POST", "/abort", json=[request_ids, verifier])
        return {named: tokens for answer in answers.values() for named, tokens in answer.json().items()}

    async def pauses(self) -> Pauses:
        """Which verifiers are paused, as another process knows."""
        answers = await self._ask_all("GET", "/pauses", timeout_s=READY_TIMEOUT_S)
        return next((msgspec.json.decode(answer.content, type=Pauses) for answer in answers.values()), Pauses())

    async def tell_pauses(self, pauses: Pauses) -> None:
        """Has all other processes pause verifiers that become ready, or no longer."""
        self._tell_of_others(
            await self._ask_all("POST", "/pauses", json=msgspec.to_builtins(pauses)), "did not hear of a pause"
        )

    async def update_number(self, gateway: Gateway) -> int:
        """Of the next update of the weights: the first process counts for all.  Raises `Unavailable`."""
        if self.is_first:
            return gateway.client.core.weights.next_number()
        answers = await self._ask_all("POST", "/update-number", of=[0])
        if 0 not in answers:
            raise Unavailable
        return int(answers[0].json())

    async def _ask_all(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
        json: object = None,
        of: Sequence[int] | None = None,
    ) -> dict[int, httpx.Response]:
        """The other processes' answers that come in time, by process number."""

        async def ask(number: int) -> tuple[int, httpx.Response] | None:
            transport = httpx.AsyncHTTPTransport(uds=str(self._path(number)))
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://peer", timeout=timeout_s) as http:
                    return number, await http.request(method, path, params=params, json=json)
            except httpx.TransportError:
                return None

        return dict(filter(None, await asyncio.gather(*map(ask, self._others if of is None else of))))

    def _path(self, index: int) -> Path:
        return self._folder / f"gateway-{index}.sock"

    async def _keep(self, index: int, port: int) -> None:
        """Starts one process, again whenever it has ended."""
        assert self._command is not None
        wait_s, most_s = BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # In a session of its own, because a Ctrl-C in the terminal must reach only the first process.  The child reads the
            # pipe, and so notices when the first process is gone.
            child = await asyncio.create_subprocess_exec(
                *self._command(index, port), stdin=asyncio.subprocess.PIPE, start_new_session=True
            )
            self._children[index] = child
            if self._stopping.is_set():
                child.terminate()
            await child.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - began > LIVED_S:
                wait_s = BACKOFF_S[0]
            logger.error("gateway process %d ended with %s; another starts in %g s", index, child.returncode, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)


def exposed(gateway: Gateway, *, fleet: bool) -> str:
    """This process's own metrics, with a label for it; with `fleet`, also the fleet's, without that label."""
    metrics = gateway.metrics
    of_fleet = set(_families(generate_latest(metrics.fleet).decode()))
    lines: list[str] = []
    for name, family in _families(generate_latest(metrics.registry).decode()).items():
        if name not in of_fleet:
            lines += [_labelled(line, gateway.client.core.gateway_id) for line in family]
        elif fleet:
            lines += family
    return "\n".join(lines) + "\n"


def merged(texts: Sequence[str]) -> str:
    """Merges texts in Prometheus' format, so that all samples of a family stand together."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for name, family in _families(text).items():
            families.setdefault(name, [line for line in family if line.startswith("#")])
            families[name] += [line for line in family if not line.startswith("#")]
    return "\n".join(line for family in families.values() for line in family) + "\n"


def _families(text: str) -> dict[str, list[str]]:
    families: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = families.setdefault(line.split(" ", 3)[2], [])
        current.append(line)
    return families


def _labelled(line: str, gateway_id: str) -> str:
    found = _SAMPLE.match(line)
    if found is None:
        return line
    name, labels, value = found.groups()
    return f'{name}{{gateway="{gateway_id}"{"," + labels if labels else ""}}} {value}'


async def _ready(request: Request) -> Response:
    client = request.app.state.gateway.client
    return Response(status_code=200 if client.ready and not client.core.draining else 503)


async def _metrics(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    assert gateway.peers is not None
    return Response(exposed(gateway, fleet=gateway.peers.is_first))


async def _prepare_reload(request: Request) -> Response:
    try:
        await request.app.state.gateway.reloader.prepare()
    except ReloadError as error:
        return Response(str(error), status_code=400)
    return Response()


async def _apply_reload(request: Request) -> Response:
    request.app.state.gateway.reloader.apply()
    return Response()


async def _abort(request: Request) -> Response:
    return JSONResponse(request.app.state.gateway.abort(*await request.json()))


async def _pauses(request: Request) -> Response:
    core = request.app.state.gateway.client.core
    if request.method == "POST":
        core.pauses = msgspec.json.decode(await request.body(), type=Pauses)
    return JSONResponse(msgspec.to_builtins(core.pauses))


async def _update_number(request: Request) -> Response:
    return JSONResponse(request.app.state.gateway.client.core.weights.next_number())


async def _adapters(request: Request) -> Response:
    models = request.app.state.gateway.services.models
    if request.method == "GET":
        known = models.lora_requests.values()
        return JSONResponse([{"lora_name": each.lora_name, "lora_path": each.lora_path} for each in known])
    asked = await request.json()
    if request.method == "POST":
        said = await models.load_lora_adapter(LoadLoRAAdapterRequest(**asked))
    else:
        said = await models.unload_lora_adapter(UnloadLoRAAdapterRequest(**asked))
    return Response(status_code=200 if isinstance(said, str) else 400)


async def _cancel(request: Request) -> Response:
    query = request.query_params
    await request.app.state.gateway.responses.end(query["id"], query["owner"])
    return Response()
