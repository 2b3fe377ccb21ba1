"""Weights for a rollout's later rounds, and the curves of its figures."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from backend.config.sources import CommandError, ConfigError
from backend.engine.client import EngineClient
from backend.fleet.stats import Weights
from backend.models.demo import TARGET_DIR
from backend.rollout.log import RoundLog
from backend.rollout.main import _renew
from backend.rollout.weights import WeightsError, check_weights, newest
from backend.rollout.workers import Workers
from tests.support.fleet_process import wait_for
from tests.support.rollout_fleet import Fleet, respond


def test_the_newest_is_the_highest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    for name in ("step-9", "step_10", "step-11.part", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-12").touch()
    assert newest(tmp_path) == tmp_path / "step_10"
    (tmp_path / "latest").write_text("other\n")
    assert newest(tmp_path) == tmp_path / "other"
    for nothing in ("", "gone"):
        (tmp_path / "latest").write_text(nothing)
        with pytest.raises(WeightsError, match="no such directory"):
            newest(tmp_path)
    with pytest.raises(WeightsError, match="No such file"):
        newest(tmp_path / "nowhere")


def test_what_does_not_fit_is_found_before_anything_starts(tmp_path: Path) -> None:
    check_weights(tmp_path, str(TARGET_DIR))
    shutil.copytree(TARGET_DIR, tmp_path / "step-1")
    check_weights(tmp_path, str(TARGET_DIR))
    (tmp_path / "step-2").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "step-2" / "model.safetensors")
    with pytest.raises(WeightsError, match="step-2: other tensors"):
        check_weights(tmp_path, str(TARGET_DIR))


def wait_until(workers: Workers, condition: Callable[[], bool]) -> None:
    """Receives until `condition()` holds."""

    def holds() -> bool:
        workers.receive()
        return condition()

    wait_for(holds)


REPORT: Mapping[str, Any] = {
    "workers": [{"busy_s": 3.0, "idle_s": {"no_work": 0.5, "swap": 0.5}}, {"busy_s": 4.0, "idle_s": {}}],
    "acceptance_is": "live",
    "live_acceptance_length": 2.5,
    "tokens_per_s": 100.0,
    "wall_s": 4.0,
}
FIGURES = {
    "rollout/idle_share": 0.125,
    "rollout/live_acceptance_length": 2.5,
    "rollout/tokens_per_s": 100.0,
    "rollout/wall_s": 4.0,
}


def test_figures_go_to_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            said.append(directory)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            said.append((name, value, step))

        def flush(self) -> None:
            said.append("flushed")

        def close(self) -> None:
            said.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    log = RoundLog("tensorboard:/logs")
    log.close()
    assert said == []
    log.write(7, REPORT)
    log.close()
    assert (said[0], said[-2:]) == ("/logs", ["flushed", "closed"])
    assert sorted(said[1:-2]) == [(name, value, 7) for name, value in FIGURES.items()]


def test_figures_go_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = SimpleNamespace(log=lambda scalars, step: said.append((scalars, step)), finish=lambda: said.append("finished"))

    def init(project: str) -> SimpleNamespace:
        said.append(project)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    log = RoundLog("wandb:mine")
    log.write(7, REPORT)
    log.write(8, {**REPORT, "live_acceptance_length": None})
    log.close()
    assert said[:2] == ["mine", (FIGURES, 7)]
    assert "rollout/live_acceptance_length" not in said[2][0]
    assert said[3:] == ["finished"]


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ("wandb", "tensorboard:DIR or wandb:PROJECT"),
        ("csv:x", "tensorboard:DIR or wandb:PROJECT"),
        ("wandb:x", "the Python package wandb is not installed"),
        ("tensorboard:x", "the Python package tensorboard is not installed"),
    ],
)
def test_a_log_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, wanted: str, complaint: str) -> None:
    for name in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=complaint):
        RoundLog(wanted)


def test_weights_follow_those_that_gateways_have_had_loaded(fleet: Fleet, workers: Workers) -> None:
    """A rollout that has joined a fleet counts on where its gateways are, and goes back to their weights."""
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    theirs = Weights(5, "five", "/w/five")
    first.weights = second.weights = theirs
    workers.look()
    assert workers.weights == theirs
    second.failure = "ValueError: no such directory"
    assert workers.load(Path("/w/step-1"))
    assert first.utilities == [("reload_weights", ["/w/step-1", "step-1", 6]), ("reload_weights", ["/w/five", "five", 7])]
    second.failure = None
    assert workers.load(Path("/w/step-2")) == ""
    assert first.weights == second.weights == Weights(8, "step-2", "/w/step-2")


def test_verifiers_hear_of_a_rollout_whose_weights_another_one_still_loads(
    fleet: Fleet, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.start("verifier-0", respond)
    slow = fleet.start("verifier-1", respond)
    pings = Counter[str]()

    def end_when_pinged() -> None:
        if pings["verifier-0"] >= 2 and "verifier-1" in fleet.verifiers:
            fleet.kill("verifier-1")

    workers.look()
    slow.hung = True
    client = workers.present["verifier-0"].client

    def ping() -> None:
        pings["verifier-0"] += 1
        EngineClient.ping(client)

    monkeypatch.setattr(client, "ping", ping)
    fleet.on_look = end_when_pinged
    assert workers.load(Path("/w/step-1")) == ""


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


def test_weights_are_loaded_by_a_verifier_that_has_forgotten_the_rollout(fleet: Fleet, workers: Workers) -> None:
    verifier = fleet.start("verifier-0", respond)
    workers.look()
    fleet.call(verifier.clients.clear)
    assert workers.load(Path("/w/step-1")) == ""
    assert verifier.utilities == [("reload_weights", ["/w/step-1", "step-1", 1])]
    workers.present["verifier-0"].client.is_cut = True
    assert workers.load(Path("/w/step-2")) == ""
    assert not workers.present["verifier-0"].client.is_cut


def test_a_restarted_verifier_loads_what_gateways_have_had_loaded_meanwhile(fleet: Fleet, workers: Workers) -> None:
    first = fleet.start("verifier-0", respond)
    workers.look()
    first.weights = Weights(7, "seven", "/w/seven")
    fleet.call(first.send_stats)
    client = workers.present["verifier-0"].client
    client.run_until(lambda: client.stats is not None)
    restarted = fleet.start("verifier-1", respond)
    restarted.holds = True
    assert workers.look() == ([], [])
    assert sorted(workers.present) == ["verifier-0"], "the others go on meanwhile"
    wait_for(lambda: bool(restarted.utilities))
    first.weights = Weights(8, "eight", "/w/eight")
    fleet.call(first.send_stats)
    wait_until(workers, lambda: client.weights.update == 8)
    restarted.holds = False
    fleet.call(restarted.carry_out)
    wait_until(workers, lambda: "verifier-1" in {worker.name for worker in workers.look()[0]})
    assert restarted.utilities == [("catch_up", [f"/w/{name}", name, n]) for n, name in ((7, "seven"), (8, "eight"))]


def test_a_verifier_that_cannot_catch_up_or_ends_meanwhile_is_left_out(fleet: Fleet, workers: Workers) -> None:
    first = fleet.start("verifier-0", respond)
    workers.look()
    first.weights = Weights(7, "seven", "/w/seven")
    fleet.call(first.send_stats)
    wait_until(workers, lambda: workers.version == "seven")
    failing, dying = fleet.start("verifier-1", respond), fleet.start("verifier-2", respond)
    failing.failure, dying.holds = "ValueError: no such directory", True
    wait_until(workers, lambda: bool(workers.look() and failing.utilities and dying.utilities))
    fleet.kill("verifier-2")
    wait_until(workers, lambda: not (workers.look() and workers._catching_up))
    assert sorted(workers.present) == ["verifier-0"]
    assert len(failing.utilities) == 1, "it is not asked again at once"
    renewed = fleet.start("verifier-2", respond)
    wait_until(workers, lambda: bool(workers.look() and "verifier-2" in workers.present))
    assert renewed.utilities == [("catch_up", ["/w/seven", "seven", 7])]


def test_the_newest_weights_are_loaded_again_where_gateways_have_changed_them(
    fleet: Fleet, workers: Workers, tmp_path: Path
) -> None:
    verifier = fleet.start("verifier-0", respond)
    (tmp_path / "step-1").mkdir()
    workers.look()
    for _ in range(2):
        assert _renew(tmp_path, workers, lambda line: None) == ""
    verifier.weights = Weights(7, "seven", "/w/seven")
    fleet.call(verifier.clients.clear)
    assert _renew(tmp_path, workers, lambda line: None) == ""
    path = str(tmp_path / "step-1")
    assert verifier.utilities == [("reload_weights", [path, "step-1", number]) for number in (1, 8)]


def test_weights_that_came_as_tensors_cannot_come_back(fleet: Fleet, workers: Workers) -> None:
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    first.weights = second.weights = Weights(5, "five", None)
    workers.look()
    fleet.start("verifier-2", respond)
    workers.look()
    assert "verifier-2" not in workers.present, "it has the weights of the start"
    second.failure = "ValueError: no such directory"
    with pytest.raises(CommandError, match="/w/step-1: not all verifiers could load it, and the weights before came as"):
        workers.load(Path("/w/step-1"))


def test_new_weights_are_all_verifiers_or_none(fleet: Fleet, workers: Workers) -> None:
    first, second = fleet.start("verifier-0", respond), fleet.start("verifier-1", respond)
    workers.look()
    assert workers.load(Path("/w/step-3")) == ""
    assert first.utilities == second.utilities == [("reload_weights", ["/w/step-3", "step-3", 1])]
    second.failure = "ValueError: no such directory"
    assert workers.load(Path("/w/step-4")) == "verifier-1: ValueError: no such directory"
    assert (workers.version, workers.weights) == ("step-3", Weights(3, "step-3", "/w/step-3"))
    fleet.kill("verifier-0")
    renewed = fleet.start("verifier-0", respond)
    wait_until(workers, lambda: bool(workers.look() and renewed.utilities and len(workers.present) == 2))
    assert renewed.utilities == [("catch_up", ["/w/step-3", "step-3", 3])]
    assert sorted(workers.present) == ["verifier-0", "verifier-1"]
