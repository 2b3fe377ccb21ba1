"""The verifier's main loop: which time it tells those that keep leases and deadlines."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)

from backend.engine.loop import EngineLoop
from backend.fleet import VerifierStats


def test_what_has_come_during_long_work_is_read_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or gateways would look silent whose pings were waiting, and drafters slow that were only just asked."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("backend.engine.loop.time", clock)
    told: dict[str, float] = {}

    def takes_a_minute(*_: Any) -> None:
        clock.now += 60.0

    def receive(now: float) -> float:
        told["gateways"] = now
        takes_a_minute()
        loop.stop()
        return 60.0

    core: Any = Mock()
    core.scheduler.counters.stats = VerifierStats("v", 0.0, "auto", 4)
    links: Any = Mock(set_drafters=takes_a_minute, receive=lambda now: told.update(drafters=now))
    loop = EngineLoop(core, Mock(), Mock(receive=receive), links, Mock(is_paused=True))
    loop.set_drafters([])
    loop.run()
    assert told == {"gateways": 160.0, "drafters": 220.0}
