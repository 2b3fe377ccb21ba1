"""Who runs where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from backend.config import Settings
from backend.launch.plan import FleetPlan, Hardware, PlanError, plan, share_cores
from backend.models import ResolvedModels

EAGLE = ResolvedModels("/t", "/d", "eagle", "demo")
RUNTIME = Path("/run/x")


def decide(changes: dict[str, Any], models: ResolvedModels = EAGLE, **hardware: Any) -> FleetPlan:
    offered = {"cores": [0, 1], "gpus": 0.0, "nodes": 1, "host": "127.0.0.1", "local": True, **hardware}
    return plan(Settings.model_validate(changes), models, Hardware(**offered), RUNTIME)


def test_two_cores_are_one_each() -> None:
    decided = decide({})
    assert {m.member_id: m.cores for m in decided.members} == {"verifier-0": [0], "drafter-0": [1]}
    assert decided.notes == ["CPU cores: verifier-0 0; drafter-0 1"]
    assert [m.env for m in decided.members] == [{"OMP_NUM_THREADS": "1"}] * 2
    assert [m.address for m in decided.members] == ["ipc:///run/x/verifier-0.sock", "ipc:///run/x/drafter-0.sock"]
    assert not decided.encrypted


def test_too_few_cores_are_shared_and_said_so() -> None:
    decided = decide({"verifiers": 2, "drafters": 2})
    assert [m.cores for m in decided.members] == [[0], [1], [0], [1]]
    assert "shared: 4 wanted, 2 available" in decided.notes[0]


@pytest.mark.parametrize("mode", ["off", "native"])
def test_only_remote_drafting_starts_drafters(mode: str) -> None:
    assert [m.kind for m in decide({"mode": mode, "drafters": 3}).members] == ["verifier"]


def test_with_gpus_nothing_is_bound_to_cores() -> None:
    decided = decide({}, gpus=2.0)
    assert [(m.cores, m.num_gpus, m.env) for m in decided.members] == [([], 1.0, {}), ([], 1.0, {})]
    assert (decided.settings.verifier.gpus, decided.settings.drafting.gpus) == (1, 1.0)


def test_one_gpu_is_shared_and_memory_with_it() -> None:
    decided = decide({}, gpus=1.0)
    assert [m.num_gpus for m in decided.members] == [0.5, 0.5]
    assert decided.settings.verifier.gpus == 1
    assert decided.settings.verifier.engine_args == {"gpu_memory_utilization": 0.45}
    assert "shared" in decided.notes[0]


def test_an_ngram_drafter_needs_no_gpu() -> None:
    decided = decide({"drafter": "ngram"}, ResolvedModels("/t", None, "ngram"), gpus=1.0)
    assert [m.num_gpus for m in decided.members] == [1.0, 0.0]


@pytest.mark.parametrize("changes", [{"verifier": {"gpus": 2}}, {"drafting": {"gpus": 1.5}}])
def test_gpus_asked_for_and_not_there_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="needs"):
        decide(changes, gpus=1.0)


def test_several_nodes_talk_encrypted_tcp() -> None:
    decided = decide({}, nodes=2, local=False, host="10.0.0.1")
    assert decided.encrypted
    assert {m.address for m in decided.members} == {"tcp://node:0"}
    assert [(m.cores, m.num_cpus) for m in decided.members] == [([], 1), ([], 1)]


def test_tcp_on_one_host_binds_to_what_was_configured() -> None:
    assert decide({"transport": {"kind": "tcp"}}).members[0].address == "tcp://127.0.0.1:0"
    assert decide({"transport": {"kind": "tcp", "host": "::1"}}).members[0].address == "tcp://[::1]:0"


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(PlanError, match="too long"):
        plan(Settings(), EAGLE, Hardware([0], 0, 1, "127.0.0.1", True), Path("/" + "x" * 100))


@given(st.lists(st.integers(0, 63), min_size=1, max_size=16, unique=True), st.lists(st.integers(0, 5), max_size=8))
def test_cores_are_disjoint_while_they_last(available: list[int], counts: list[int]) -> None:
    shares = share_cores(available, counts)
    assert [len(share) for share in shares] == [min(count, len(available)) for count in counts]
    assert all(set(share) <= set(available) for share in shares)
    if sum(counts) <= len(available):
        used = [core for share in shares for core in share]
        assert len(used) == len(set(used))
