"""Several gateway processes on one port, of which most are not there (real ones: `tests/integration/served`)."""

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from backend.config.sources import ConfigError
from gateway.http.errors import NotFound
from gateway.peers import _CALLS, Peers
from tests.support.fake_verifier import eventually


async def test_a_process_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = AsyncMock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("gateway.peers.BACKOFF_S", (0.001, 0.001))
    peers = Peers(tmp_path, 0, 2, command=lambda *_: ["x"])
    await peers.start(Mock(), 0)
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
    first, second = Peers(tmp_path, 0, 2), Peers(tmp_path, 1, 2)
    gateways = [metrics_of("1", first), metrics_of("2", second)]
    await first.start(gateways[0], 0)
    text = [line for line in (await second.metrics(gateways[1])).splitlines() if "a_created" not in line]
    assert text == [
        *("# HELP a_total x", "# TYPE a_total counter"),
        *('a_total{code="200",gateway="1"} 1.0', 'a_total{code="200",gateway="2"} 1.0'),
        *("# HELP b y", "# TYPE b gauge", "b NaN"),
    ]
    await first.close(0)


async def test_a_call_that_fails_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller, callee = (Peers(tmp_path, number, 2) for number in range(2))
    assert not await caller.ready(), "nobody is there"
    await callee.start(cast(Any, SimpleNamespace(read_settings=Mock(side_effect=ConfigError))), 0)
    monkeypatch.setitem(_CALLS, "ready", AsyncMock(side_effect=NotFound("x")))
    assert not await caller.ready()
    monkeypatch.setitem(_CALLS, "abort", lambda gateway, request_ids, verifier: {request_ids[0]: []})
    large = "x" * (1 << 20)
    assert await caller.abort([large], None) == {large: []}
    await callee.close(0)
