"""A gateway in the test's event loop, in front of real verifiers and drafters in processes of their own, without Ray."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from backend.config import REMOTE_MODES, Settings
from backend.fleet import Member
from backend.models.demo import TARGET_DIR
from gateway.http.server import GatewayServer
from tests.support.fake_verifier import StaticDirectory, eventually
from tests.support.processes import Drafter, Verifier, together
from tests.support.running_gateway import Running, serving

NEVER_S = 1e6


class EngineFleet(Running):
    """The gateway, with real verifiers.  It moves no requests by itself."""

    verifiers: list[Verifier]

    async def quiet(self) -> None:
        """Waits until no request is in flight at the gateway or at any connected verifier."""

        def empty() -> bool:
            stats = self.core.stats()
            return bool(stats) and all(each.running + each.waiting == 0 for each in stats)

        await eventually(lambda: not self.core.sequences and empty())


@asynccontextmanager
async def engine_fleet(
    verifiers: int, mode: str = "sync", verifier: dict[str, Any] | None = None
) -> AsyncIterator[EngineFleet]:
    """Starts a fleet; in modes with remote drafting, one drafter serves all verifiers."""
    sections = {"mode": mode, "verifier": verifier or {}}
    with ExitStack() as stack:
        stack.enter_context(mock.patch("gateway.fleet.balancing.INTERVAL_S", NEVER_S))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        starts: list[Any] = [partial(Verifier, folder, sections)] * verifiers
        if mode in REMOTE_MODES:
            starts.append(partial(Drafter, folder))
        children = await asyncio.to_thread(stack.enter_context, together(*starts))
        real, drafters = children[:verifiers], [each.ref for each in children[verifiers:]]
        for each in real:
            each.set_drafters(*drafters)
        directory = StaticDirectory(
            [Member(each.name, "verifier", "incarnation", each.address, "", "n", each.pid, "demo", "ready") for each in real]
        )
        settings = Settings.model_validate(sections | {"gateway": {"port": 0}})
        server = GatewayServer(settings, directory, str(TARGET_DIR), model_name="demo")
        async with serving(server, verifiers) as (http, task):
            yield EngineFleet(server, directory, real, http, task)
