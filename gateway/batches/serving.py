"""The files and batches of one gateway process: their store and their runner."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import FastAPI

from backend.config import Settings
from gateway.access import AccessRules
from gateway.batches.calls import Calls, rights_of
from gateway.batches.pace import Pace
from gateway.batches.runner import Runner
from gateway.batches.store import Store
from gateway.errors import BadRequest
from gateway.fleet_core import FleetCore
from gateway.metrics import GatewayMetrics


@dataclass
class Batches:
    """Store and runner.  `folder` is None where nothing is stored; `model` is the fleet's model."""

    folder: Path | None
    settings: Settings
    model: str

    def __post_init__(self) -> None:
        self._store = None if self.folder is None else Store(self.folder, self.settings.gateway.files_bytes)
        self._runner: Runner | None = None
        self.endpoints: tuple[str, ...] = ()

    @property
    def store(self) -> Store:
        """The store.  Raises `BadRequest` where there is none."""
        if self._store is None:
            raise BadRequest("This server keeps no files (`gateway.state_dir` is `none`).", code="not_stored")
        return self._store

    def start(self, app: FastAPI, core: FleetCore, metrics: GatewayMetrics, doors: AccessRules) -> None:
        """Begins to carry out stored batches, through the routes of `app`."""
        calls = Calls(app, partial(rights_of, doors=doors))
        self.endpoints = calls.endpoints
        if self._store is None or self.folder is None:
            return
        self._runner = Runner(
            self._store,
            calls,
            Pace(core, self.settings.verifier.max_num_seqs),
            metrics,
            folder=self.folder,
            model=self.model,
            max_body_bytes=self.settings.gateway.max_body_mib << 20,
            draining=lambda: core.draining,
        )
        self._runner.start()

    def tell(self) -> None:
        if self._runner is not None:
            self._runner.tell()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
