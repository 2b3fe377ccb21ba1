"""Runs a gateway: builds its parts, serves HTTP, drains and stops.

One process, one event loop.  Building it imports vLLM, which takes seconds and half a gigabyte; import this module late.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from backend.config import Settings
from backend.engine.front import UnloadLoRAAdapterRequest
from backend.engine.front.client import FleetClient
from backend.engine.front.config import build_vllm_config
from backend.engine.front.serving import build_services
from backend.tracing import open_tracing
from backend.transport.sockets import Wire
from gateway.auth.key_ring import KeyRing, read_entries
from gateway.auth.quotas import Quotas, SharedCounters
from gateway.cli.preflight import listen, state_folder, url_of
from gateway.fleet.core import FleetCore
from gateway.fleet.directory import Directory
from gateway.fleet.pauses import Pauses
from gateway.http.app import build_app
from gateway.http.errors import ApiError, ShuttingDown
from gateway.http.protocol import BoundedProtocol
from gateway.http.spans import TracedMetrics
from gateway.metrics.fleet import FleetCollector, GatewayCollector
from gateway.metrics.gateway import GatewayMetrics
from gateway.peers import Calls, Peers
from gateway.reload import NewRules, apply_rules, reload_all
from gateway.routes.operations import families_of
from gateway.state import Gateway
from gateway.storage.batches.serving import Batches
from gateway.storage.responses.serving import ResponseService
from gateway.storage.responses.store import ResponseStore

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 120
"""Seconds that an idle connection is kept: longer than clients keep it (Python's: 5 s, Go's: 90 s), so that clients close
first.  If the server closed first, a request that is just being sent would fail."""
LOOK_S = 0.05
"""Seconds between two checks: for the start, and for open requests during a drain."""
CANCEL_GRACE_S = 5.0
"""Seconds in which streams can send their last error event after the drain time is over."""


def build_gateway(
    settings: Settings, directory: Directory, model_dir: str, *, model_name: str | None = None, wire: Wire | None = None
) -> Gateway:
    """The gateway's parts, not connected to anything yet.

    `model_dir` has the target model's tokenizer and configuration; `model_name` is the user's name for the model.  Raises
    `ValueError` or `OSError` when vLLM cannot read tokenizer or configuration.
    """
    tracing = open_tracing(settings.tracing, "gateway", f"gateway-{os.getpid()}")
    metrics = GatewayMetrics() if tracing is None else TracedMetrics(tracing)
    vllm_config = build_vllm_config(settings, model_dir)
    core = FleetCore(directory, wire or Wire(), metrics, settings)
    client = FleetClient(vllm_config, core)
    served_names = settings.gateway.served_model_name or [model_name or Path(model_dir).name]
    services = build_services(client, settings, served_names, ApiError)
    metrics.fleet.register(FleetCollector(core, served_names[0]))
    max_loras = vllm_config.lora_config.max_loras if vllm_config.lora_config else None
    metrics.own.register(GatewayCollector(core, metrics, served_names[0], max_loras))
    folder = state_folder(settings)
    store = None if folder is None else ResponseStore(folder / "responses.sqlite", settings.gateway.responses_bytes)
    responses = ResponseService(store, vllm_config.model_config.max_model_len)
    section = settings.gateway
    ring = KeyRing(section.api_key, section.admin_key, read_entries(section.keys_file))
    # Even without a keys file, because a reload may add one.
    quotas = Quotas(core.gateway_id, None if folder is None else SharedCounters(folder / "quotas.sqlite"))
    batches = Batches(folder, settings, served_names[0])
    return Gateway(settings, client, services, metrics, responses, ring, quotas, batches, tracing)


def peer_calls(gateway: Gateway) -> Calls:
    """What this process does for the others on its port."""
    core, models = gateway.client.core, gateway.services.models

    def hear_of_pauses(pauses: dict[str, Any]) -> None:
        core.pauses = msgspec.convert(pauses, Pauses)

    return {
        "abort": gateway.abort,
        "adapters": lambda: msgspec.to_builtins(list(models.lora_requests.values())),
        "hear_of_pauses": hear_of_pauses,
        "metrics": partial(families_of, gateway),
        "pauses": lambda: core.pauses,
        "ready": lambda: gateway.client.ready and not core.draining,
        "reload": lambda rules: apply_rules(gateway, NewRules.model_validate(rules)),
        "take_adapters": gateway.take_adapters,
        "unload": lambda adapter: models.unload_lora_adapter(UnloadLoRAAdapterRequest(**adapter)),
        "update_number": core.weights.next_number,
    }


class GatewayServer:
    """A gateway behind a listening socket.

    `read_settings` reads the settings again for a reload, None: they stay; `peers` are the other processes on the port.

    `on_ready(url)` is called once, when HTTP is served and the first verifier is ready (`/readyz` answers 200).  Call `run()`
    in a process's main thread, or await `serve()` in an event loop of your own and end it with `stop()`.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Directory,
        model_dir: str,
        *,
        model_name: str | None = None,
        wire: Wire | None = None,
        on_ready: Callable[[str], None] | None = None,
        read_settings: Callable[[], Settings] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.gateway = build_gateway(settings, directory, model_dir, model_name=model_name, wire=wire)
        self.gateway.read_settings = read_settings or (lambda: settings)
        self.gateway.peers = self._peers = peers or self.gateway.peers
        self.url = ""
        self._settings = settings.gateway
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        config = uvicorn.Config(
            build_app(self.gateway),
            log_config=None,
            access_log=False,
            lifespan="on",
            # A pipelined request would have the context of the one before it.
            reset_contextvars=True,
            server_header=False,
            # Otherwise uvicorn reads FORWARDED_ALLOW_IPS, and with `*` there every client could pass as local.
            forwarded_allow_ips=["127.0.0.1", "::1"],
            http=BoundedProtocol,
            ws="none",
            ssl_certfile=self._settings.tls_cert,
            ssl_keyfile=self._settings.tls_key,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(CANCEL_GRACE_S) + 1,
        )
        self._server = uvicorn.Server(config)
        # uvicorn's handling would raise a signal again after the drain, and so skip our clean-up.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM and lets open requests finish; a second signal ends them at once."""
        try:
            uvloop.run(self._run())
        finally:
            # Some libraries warn at the end of the process about objects that were never collected.
            gc.unfreeze()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        # Imported objects stay.  A garbage collection over them would hold every request for a quarter of a second.
        gc.collect()
        gc.freeze()
        try:
            await self.serve()
        finally:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(each)

    def stop(self) -> None:
        """Takes no new requests, and gives open requests `drain_s` seconds to finish.  A second call ends them at once."""
        if self._stopping.is_set():
            self.gateway.client.core.fail_all(ShuttingDown)
        self._stopping.set()
        # From now on new requests are refused, and /readyz answers 503.
        self.gateway.client.core.draining = True
        self._peers.stop()

    def reload(self) -> None:
        """Reads keys, limits and routing again.  The result is logged."""
        task = asyncio.ensure_future(reload_all(self.gateway))
        # Fetches the exception, which has been logged, so that asyncio does not report it too.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def serve(self) -> None:
        """Serves until `stop()`.  Raises `OSError` when the address cannot be bound."""
        watchers = [asyncio.create_task(self._announce()), asyncio.create_task(self._drain())]
        try:
            port = self._settings.port if self._peers.port is None else self._peers.port
            listener = listen(self._settings.host, port, shared=not self._peers.alone)
            host, port = listener.getsockname()[:2]
            self.url = url_of(self._settings.model_copy(update={"host": host, "port": port}))
            await self._peers.start(peer_calls(self.gateway), port)
            with contextlib.closing(listener):
                await self._server.serve(sockets=[listener])
        finally:
            await self._peers.close(self._settings.drain_s + 2 * CANCEL_GRACE_S)
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _announce(self) -> None:
        while not self._server.started:
            await asyncio.sleep(LOOK_S)
        logger.info("listening on %s", self.url)
        while not (self.gateway.client.ready and await self._peers.ready()):
            await asyncio.sleep(LOOK_S)
        if self._on_ready is not None:
            try:
                self._on_ready(self.url)
            except OSError as error:
                # For example, the disk is full, or the program that reads our output has ended.
                logger.error("the gateway serves, but cannot say so: %s", error)

    async def _drain(self) -> None:
        await self._stopping.wait()
        core, deadline = self.gateway.client.core, time.monotonic() + self._settings.drain_s
        while (core.sequences or self.gateway.metrics.in_flight) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_S)
        core.fail_all(ShuttingDown)
        self._server.should_exit = True
