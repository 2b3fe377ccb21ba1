"""Several gateway processes on one port, of which most are not there (real ones: `tests/integration/served`)."""

import asyncio
import errno
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.http.errors import NotFound
from gateway.peers import Peers
from gateway.routes.operations import families_of, metrics
from tests.support.fake_verifier import eventually


async def test_a_process_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = AsyncMock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("gateway.peers.BACKOFF_S", (0.001, 0.001))
    peers = Peers(tmp_path, 0, 2, command=lambda *_: ["x"])
    await peers.start({}, 0)
    await eventually(lambda: start.call_count > 1)
    await peers.close(0)


def metrics_of(gateway_id: str, peers: Peers) -> Any:
    own, fleet = CollectorRegistry(), CollectorRegistry()
    Counter("a", "x", ["code"], registry=own).labels("200").inc()
    Gauge("b", "y", registry=fleet).set(float("nan"))
    return SimpleNamespace(
        client=SimpleNamespace(core=SimpleNamespace(gateway_id=gateway_id)),
        metrics=SimpleNamespace(own=own, fleet=fleet),
        peers=peers,
    )


async def test_families_of_several_processes_stand_together_and_the_first_ones_fleet_counts(tmp_path: Path) -> None:
    first, second = (metrics_of(str(number), Peers(tmp_path, number, 2)) for number in range(2))
    await first.peers.start({"metrics": partial(families_of, first)}, 0)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(gateway=second)))
    text = [line for line in bytes((await metrics(request)).body).decode().splitlines() if "a_created" not in line]
    assert text == [
        *("# HELP a_total x", "# TYPE a_total counter"),
        *('a_total{code="200",gateway="0"} 1.0', 'a_total{code="200",gateway="1"} 1.0'),
        *("# HELP b y", "# TYPE b gauge", "b NaN"),
    ]
    await first.peers.close(0)


async def test_a_call_that_fails_has_no_result(tmp_path: Path) -> None:
    caller, callee = (Peers(tmp_path, number, 2) for number in range(2))
    assert not await caller.ready(), "nobody is there"
    await callee.start({"ready": AsyncMock(side_effect=NotFound("x")), "abort": lambda ids, verifier: {ids[0]: []}}, 0)
    assert not await caller.ready()
    large = "x" * (1 << 20)
    assert await caller.ask("abort", [large], None) == {1: {large: []}}
    await callee.close(0)
