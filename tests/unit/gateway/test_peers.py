"""Several gateway processes on one port, of which most are not there (real ones: `tests/integration/served`)."""

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from backend.config.sources import ConfigError, load
from gateway.http.errors import NotFound
from gateway.peers import _CALLS, Peers, merged
from tests.support.fake_verifier import eventually


async def test_a_process_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = AsyncMock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("gateway.peers.BACKOFF_S", (0.001, 0.001))
    keeping = asyncio.create_task(Peers(tmp_path, 0, 2, command=lambda *_: ["x"])._keep(1, 0))
    await eventually(lambda: start.call_count > 1 or keeping.done())
    assert not keeping.done()
    keeping.cancel()


def test_families_of_several_processes_stand_together() -> None:
    one = '# HELP a_total x\n# TYPE a_total counter\na_total{gateway="1"} 1\n# HELP b y\n# TYPE b gauge\nb 2\n'
    assert merged([one, one.replace('"1"', '"2"').partition("# HELP b")[0]]).count("# TYPE a_total") == 1


async def test_a_call_that_fails_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking, asked = (Peers(tmp_path, number, 2) for number in range(2))
    assert await asking._ask("ready") == {}, "nobody is there"
    await asked.start(cast(Any, SimpleNamespace(reloader=Mock(read=AsyncMock()))), 0)
    monkeypatch.setitem(_CALLS, "ready", AsyncMock(side_effect=NotFound("x")))
    assert await asking._ask("ready") == {}
    assert not await asking.ready()
    monkeypatch.setitem(_CALLS, "ready", lambda gateway, *given: given)
    large = ["x" * (1 << 20)]
    assert await asking._ask("ready", large) == {1: [large]}
    await asked.close(0)


def test_a_unix_socket_is_not_shared() -> None:
    with pytest.raises(ConfigError, match="uds"):
        load(["--gateways", "2", "--gateway-uds", "/tmp/x"])
