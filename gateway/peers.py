"""Several gateway processes on one port: their messages to each other, and how the first process keeps the others running.

Each process listens on the port by itself (SO_REUSEPORT); Linux spreads connections over the processes by a hash of addresses.
Each also answers the other processes on a Unix socket, in a folder that only this user may enter: a connection for each call,
with MessagePack both ways.  One event loop per process.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.samples import Sample

from backend.config.sources import ConfigError
from backend.engine.front import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from gateway.fleet.pauses import Pauses
from gateway.http.errors import ApiError, Unavailable, checked
from gateway.reload import NewRules, apply_rules, read_rules
from gateway.state import Gateway

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0
BACKOFF_S = (0.5, 30.0)
"""Seconds before a process that died is started again: first and longest wait."""
LIVED_S = 60.0
"""After so many seconds of life, the wait is the shortest again."""

Command = Callable[[int, int], Sequence[str]]
"""Makes a process's command line from its number and the port."""


class Peers:
    """This process, number `index` of `count`, and the others.  Only the first has a `command`, and starts the others.

    `folder` is where their sockets are; None where there are no others.
    """

    def __init__(
        self,
        folder: Path | None = None,
        index: int = 0,
        count: int = 1,
        *,
        port: int | None = None,
        command: Command | None = None,
    ) -> None:
        self.port = port
        """The port to listen on; None in the first process, which uses the setting."""
        self._folder, self._index = folder, index
        self._others = [number for number in range(count) if number != index]
        self._command = command
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._stopping = asyncio.Event()

    @property
    def alone(self) -> bool:
        return not self._others

    @property
    def is_first(self) -> bool:
        return self._index == 0

    async def start(self, gateway: Gateway, port: int) -> None:
        """Begins to answer the other processes.  The first process also starts them."""
        if self.alone:
            return
        self._server = await asyncio.start_unix_server(partial(_answer, gateway), self._path(self._index))
        if self._command is not None:
            self._keepers = [asyncio.create_task(self._keep(number, port)) for number in self._others]
        elif not self.is_first:
            # What the other processes were asked for before has missed this one.
            with contextlib.suppress(ConfigError):
                apply_rules(gateway, await read_rules(gateway))

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
        if self._server is not None:
            self._server.close()

    async def ready(self) -> bool:
        """Whether all other processes could serve a request now."""
        answers = await self._ask("ready", timeout_s=READY_TIMEOUT_S)
        return len(answers) == len(self._others) and all(answers.values())

    async def metrics(self, gateway: Gateway) -> str:
        """Every process's metrics, labelled by process, and the fleet's metrics as the first process sees them.

        Processes hear about the fleet at different moments: from several of them, counters would jump back between two scrapes.
        """
        if self.alone:
            return (generate_latest(gateway.metrics.own) + generate_latest(gateway.metrics.fleet)).decode()
        found = {**await self._ask("metrics"), self._index: _families(gateway)}
        return exposed(family for number in sorted(found) for family in found[number])

    async def adapters(self) -> list[dict[str, Any]]:
        """LoRA adapters that another process has loaded, as requests to load them."""
        answers = await self._ask("adapters", timeout_s=READY_TIMEOUT_S)
        return max(answers.values(), key=len, default=[])

    async def abort(self, request_ids: list[str] | None, verifier: str | None) -> dict[str, list[list[int]]]:
        """Ends requests of the other processes; the tokens they had."""
        answers = await self._ask("abort", request_ids, verifier)
        return {named: tokens for answer in answers.values() for named, tokens in answer.items()}

    async def pauses(self) -> Pauses:
        """Which verifiers are paused, as another process knows."""
        answers = await self._ask("pauses", timeout_s=READY_TIMEOUT_S)
        return next((msgspec.convert(answer, Pauses) for answer in answers.values()), Pauses())

    async def tell(self, failed: str, call: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Makes a call of `_CALLS` in all other processes, and logs which of them `failed`."""
        done = await self._ask(call, *arguments, timeout_s=timeout_s)
        if behind := [str(number) for number in self._others if number not in done]:
            logger.error("gateway processes that %s: %s", failed, ", ".join(behind))

    async def update_number(self, gateway: Gateway) -> int:
        """The number of the next update of the weights; the first process counts for all.  Raises `Unavailable`."""
        if self.is_first:
            return gateway.client.core.weights.next_number()
        answers = await self._ask("update_number", of=[0])
        if 0 not in answers:
            raise Unavailable
        return int(answers[0])

    async def _ask(
        self, call: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S, of: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """What the other processes return that carry out a call of `_CALLS` in time, by process number."""

        async def ask(number: int) -> tuple[int, Any] | None:
            try:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await asyncio.open_unix_connection(self._path(number))
                    with contextlib.closing(writer):
                        writer.write(msgspec.msgpack.encode([call, *arguments]))
                        writer.write_eof()
                        return number, msgspec.msgpack.decode(await reader.read())
            except (OSError, msgspec.DecodeError):
                return None

        return dict(filter(None, await asyncio.gather(*map(ask, self._others if of is None else of))))

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"gateway-{index}.sock"

    async def _keep(self, index: int, port: int) -> None:
        """Starts one process, again whenever it has ended."""
        assert self._command is not None
        wait_s, most_s = BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # In a session of its own, because a Ctrl-C in the terminal must reach only the first process.  The child reads the
            # pipe, and so notices when the first process is gone.
            ended: int | OSError
            try:
                child = await asyncio.create_subprocess_exec(
                    *self._command(index, port), stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
                self._children[index] = child
                if self._stopping.is_set():
                    child.terminate()
                ended = await child.wait()
            except OSError as error:
                # For example, too many files are open.
                ended = error
            if self._stopping.is_set():
                return
            if time.monotonic() - began > LIVED_S:
                wait_s = BACKOFF_S[0]
            logger.error("gateway process %d ended with %s; another starts in %g s", index, ended, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)


def _families(gateway: Gateway) -> list[dict[str, Any]]:
    """This process's own metrics, with a label for it; of the first process also the fleet's, without that label."""
    own, label = list(gateway.metrics.own.collect()), {"gateway": gateway.client.core.gateway_id}
    for family in own:
        family.samples = [each._replace(labels=label | each.labels) for each in family.samples]
    return [vars(each) for each in (*own, *(gateway.metrics.fleet.collect() if gateway.peers.is_first else ()))]


def exposed(families: Iterable[Mapping[str, Any]]) -> str:
    """Several processes' metrics in Prometheus' format, where all samples of a family stand together."""
    merged: dict[str, Metric] = {}
    for each in families:
        family = merged.setdefault(each["name"], Metric(each["name"], each["documentation"], each["type"]))
        family.samples += [Sample(*sample) for sample in each["samples"]]
    return generate_latest(cast(Any, SimpleNamespace(collect=merged.values))).decode()


def _adapters(gateway: Gateway) -> list[dict[str, str]]:
    known = gateway.services.models.lora_requests.values()
    return [{"lora_name": each.lora_name, "lora_path": each.lora_path} for each in known]


def _hear_of_pauses(gateway: Gateway, payload: dict[str, Any]) -> None:
    gateway.client.core.pauses = msgspec.convert(payload, Pauses)


_CALLS: Mapping[str, Callable[..., Any]] = {
    "abort": lambda gateway, request_ids, verifier: gateway.abort(request_ids, verifier),
    "adapters": _adapters,
    "hear_of_pauses": _hear_of_pauses,
    "load": lambda gateway, payload: gateway.services.models.load_lora_adapter(LoadLoRAAdapterRequest(**payload)),
    "metrics": _families,
    "pauses": lambda gateway: gateway.client.core.pauses,
    "ready": lambda gateway: gateway.client.ready and not gateway.client.core.draining,
    "reload": lambda gateway, rules: apply_rules(gateway, NewRules.model_validate(rules)),
    "unload": lambda gateway, payload: gateway.services.models.unload_lora_adapter(UnloadLoRAAdapterRequest(**payload)),
    "update_number": lambda gateway: gateway.client.core.weights.next_number(),
}
"""What a process does for another one; some are coroutines."""


async def _answer(gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carries out a call of another process.  A call that fails has no answer."""
    with contextlib.closing(writer), contextlib.suppress(ApiError):
        call, *arguments = msgspec.msgpack.decode(await reader.read())
        done = _CALLS[call](gateway, *arguments)
        writer.write(msgspec.msgpack.encode(checked(await done if isawaitable(done) else done)))
