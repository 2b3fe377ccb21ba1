"""A rollout's verifiers: those that do not answer, join late, or have older weights."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from backend.engine.client import EngineClient
from backend.fleet.stats import Weights
from backend.rollout.workers import Workers
from tests.support.rollout_fleet import Fleet, respond


def test_a_verifier_that_does_not_answer_costs_little_and_leaves_nothing(
    fleet: Fleet, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.rollout.workers.ANSWER_S", 0.1)
    fleet.start("verifier-0", respond)
    workers.look()
    hung = fleet.start("verifier-1", respond)
    hung.hung = True
    sockets = len(workers.hub._sockets)
    for _ in range(2):
        assert workers.look() == ([], [])
    assert len(workers.hub._sockets) == sockets
    monkeypatch.setattr("backend.rollout.workers.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    monkeypatch.setattr("backend.rollout.workers.ANSWER_S", 60.0)
    hung.hung = False
    assert [worker.name for worker in workers.look()[0]] == ["verifier-1"]


def test_verifiers_hear_of_a_rollout_while_another_one_joins(
    fleet: Fleet, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.start("verifier-0", respond)
    pings = 0
    workers.look()
    slow = fleet.start("verifier-1", respond)
    slow.hung = True
    client = workers.present["verifier-0"].client

    def ping() -> None:
        nonlocal pings
        pings += 1
        slow.hung = pings < 2
        EngineClient.ping(client)

    monkeypatch.setattr(client, "ping", ping)
    workers.look()
    assert pings >= 2


def test_a_verifier_with_older_weights_is_left_out_until_it_has_loaded_the_newest(
    fleet: Fleet, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fleet.start("verifier-0", respond)
    workers.look()
    first.weights = Weights(7, "seven", "/w/seven")
    fleet.call(first.send_stats)
    client = workers.present["verifier-0"].client
    client.run_until(lambda: client.weights.update == 7)
    restarted = fleet.start("verifier-1", respond)
    assert workers.look() == ([], [])
    assert (sorted(workers.present), workers.version) == (["verifier-0"], "seven")
    restarted.weights = first.weights
    monkeypatch.setattr("backend.rollout.workers.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    assert [worker.name for worker in workers.look()[0]] == ["verifier-1"]
