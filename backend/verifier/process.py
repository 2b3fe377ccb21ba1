"""One verifier without Ray: engine, sockets and loop.  Used by `actor.py` and by tests.

Two threads: the engine thread builds vLLM and runs `EngineLoop`; the caller's thread starts and stops it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backend.config import REMOTE_MODES, Settings
from backend.engine.build import build_config, build_core, warm_up
from backend.engine.counting import Counters
from backend.engine.draft_links import DraftLinks
from backend.engine.gateways import GatewayPort
from backend.engine.loop import EngineLoop
from backend.engine.spans import EngineSpans
from backend.engine.weights import WeightControl
from backend.engine.worker.fixed import takes_fixed
from backend.fleet import DrafterRef, VerifierStats
from backend.models.kinds import KINDS
from backend.models.resolve import ResolvedModels
from backend.tracing import open_tracing
from backend.transport import Hub, ServerKeys, Wire
from backend.wire.engine import ENGINE_WIRE_VERSION, EngineWelcome

if TYPE_CHECKING:
    from backend.records.writer import FileRecorder

logger = logging.getLogger(__name__)

SEGMENTS, SEGMENT_NAME = Path("/dev/shm"), "vllm_dist_"
"""Shared memory through which vLLM's tensor-parallel ranks reduce on CPUs; a killed rank leaves its segment behind."""


class VerifierProcess:
    """A verifier in this process.  Its records are written to files if `records.dir` is set."""

    def __init__(
        self,
        verifier_id: str,
        incarnation: str,
        settings: Settings,
        paths: ResolvedModels,
        address: str,
        fleet_keys: ServerKeys | None = None,
        server_keys: ServerKeys | None = None,
        local_address: str = "",
    ) -> None:
        self.verifier_id = verifier_id
        self.address = address
        self._local_address = local_address
        self._incarnation = incarnation
        self._settings = settings
        self._paths = paths
        self._fleet_keys = fleet_keys
        self._server_keys = server_keys
        self._loop: EngineLoop
        """Made by `start`."""
        self._failure: BaseException | None = None
        self._built = threading.Event()
        self._segments: set[Path] = set()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.on_crash: Callable[[], None] = lambda: os._exit(70)
        """Called when the engine thread dies.  The default ends the process, so that Ray starts another."""

    def start(self) -> None:
        """Loads the model and starts serving; returns when ready.  Raises the error if the start fails."""
        self._thread.start()
        self._built.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends the loop and frees the engine; once it has started."""
        self._loop.stop()
        self._thread.join(timeout=30)

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Has the engine thread apply a new assignment.  Any thread."""
        self._loop.set_drafters(refs)

    def stats(self) -> VerifierStats:
        """The counters as of the last tick (`loop.TICK_S`).  Any thread."""
        return msgspec.msgpack.decode(self._loop.published, type=VerifierStats)

    def _main(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            if not self._built.is_set():
                self._failure = error
                self._built.set()
                return
            logger.exception("the engine failed")
            self._crash()

    def _serve(self) -> None:
        config = build_config(self._settings, self._paths)
        core = build_core(config, self._lose_rank)
        self._segments = _segments_of_ranks(core.model_executor)
        warm_up(core)
        hub = Hub(Wire(self._fleet_keys))
        stats = VerifierStats(self.verifier_id, time.time(), self._settings.mode, self._settings.num_speculative_tokens)
        files = self._record_files(stats)
        tracing = open_tracing(self._settings.tracing, "verifier", self.verifier_id)
        try:
            self._loop = self._make_loop(config, core, hub, stats, files)
            if tracing is not None:
                core.scheduler.observers.append(EngineSpans(tracing, self.verifier_id))
            self._built.set()
            self._loop.run()
        finally:
            if files is not None:
                files.close()
            if tracing is not None:
                tracing.close()
            core.shutdown()
            hub.close()

    def _lose_rank(self) -> None:
        if self._built.is_set():
            logger.error("a tensor-parallel rank died, and the verifier with it")
            self._crash()

    def _crash(self) -> None:
        """Ends the process; called by whichever thread, the engine's or one of vLLM's, first notices a dead rank."""
        for segment in self._segments:
            segment.unlink(missing_ok=True)
        self.on_crash()

    def _record_files(self, stats: VerifierStats) -> FileRecorder | None:
        if self._settings.records.dir is None:
            return None
        # Imported only here: without records a verifier does not need pyarrow.
        from backend.records.schema import About
        from backend.records.writer import FileRecorder

        k = stats.num_speculative_tokens if stats.mode != "off" else 0
        about = About(self.verifier_id, self._incarnation, stats.started_at, stats.mode, self._paths.name, k)
        files = FileRecorder(about, self._settings.records)
        files.start()
        return files

    def _make_loop(self, config: Any, core: Any, hub: Hub, stats: VerifierStats, files: FileRecorder | None) -> EngineLoop:
        core.scheduler.counters = Counters(stats)
        core.scheduler.source_name = self._paths.drafter_kind if KINDS[self._paths.drafter_kind].native else "native"
        router = hub.router(self.address, self._server_keys, self._local_address)
        self.address = router.address
        welcome = EngineWelcome(
            version=ENGINE_WIRE_VERSION,
            verifier_id=self.verifier_id,
            incarnation=self._incarnation,
            max_model_len=config.model_config.max_model_len,
            num_kv_blocks=config.cache_config.num_gpu_blocks,
            block_size=config.cache_config.block_size,
            supported_tasks=list(core.get_supported_tasks()),
            looks_up=self._settings.mode in REMOTE_MODES and self._settings.verifier.lookup,
            fixed_responses=takes_fixed(config),
        )
        weights = WeightControl(core, self._paths.target_dir, bool(config.model_config.enable_sleep_mode))
        gateways = GatewayPort(router, core, welcome, files.put if files is not None else None, weights)
        is_remote = self._settings.mode in REMOTE_MODES
        links = DraftLinks(hub, core, self.verifier_id) if is_remote else None
        weights.on_outputs = gateways.send_outputs

        def changed() -> None:
            stats.paused, stats.weights = weights.is_paused, weights.loaded
            gateways.send_stats(stats)

        weights.on_changed = changed
        # Who is paused is not taken for dead.  The next report, after the adapter, says how it is.
        weights.on_reading = lambda: gateways.send_stats(msgspec.structs.replace(stats, paused=True))
        if links is not None:
            weights.on_renewed = lambda: links.renew(weights.loaded)
        return EngineLoop(core, hub, gateways, links, weights, files)


def _segments_of_ranks(executor: Any) -> set[Path]:
    """The segments that the processes of vLLM's executor, if there are any, have mapped."""
    found = set()
    for worker in getattr(executor, "workers", ()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{worker.proc.pid}/maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if path.parent == SEGMENTS and path.name.startswith(SEGMENT_NAME):
                    found.add(path)
    return found
