"""Who runs where."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from backend.config import Settings
from backend.config.settings import TransportSettings
from backend.launch.plan import FleetPlan, Hardware, LaunchError, MemberPlan, plan
from backend.member.actor import tcp_address
from backend.models.resolve import OwnDrafter, ResolvedModels

EAGLE = ResolvedModels("/t", "/d", "eagle", "demo")
RUNTIME = Path("/run/x")


def decide(changes: dict[str, Any], models: ResolvedModels = EAGLE, **hardware: Any) -> FleetPlan:
    offered = {"cores": [0, 1], "gpus": 0.0, "local": True, **hardware}
    return plan(Settings.model_validate(changes), models, Hardware(**offered), RUNTIME)


def test_two_cores_are_one_each_and_too_few_are_shared() -> None:
    decided = decide({})
    assert {m.member_id: m.cores for m in decided.members} == {"verifier-0": [0], "drafter-0": [1]}
    assert decided.notes == ["CPU cores: verifier-0 0; drafter-0 1"]
    assert [m.env for m in decided.members] == [{"OMP_NUM_THREADS": "1"}] * 2
    assert [m.address for m in decided.members] == ["ipc:///run/x/verifier-0.sock", "ipc:///run/x/drafter-0.sock"]
    assert "shared: 4 wanted, 2 available" in decide({"verifiers": 2, "drafters": 2}).notes[0]
    joined = decide({}, local=False)
    assert {m.address for m in joined.members} == {""}, "TCP, even if the cluster has one node yet: it may grow at any time"
    assert [(m.cores, m.num_cpus) for m in joined.members] == [([], 1), ([], 1)]


@pytest.mark.parametrize(
    ("members", "gpus", "shares", "memory", "notes"),
    [
        ((1, 1), 2, [1, 1], {}, []),
        ((1, 1), 1, [0.501, 0.499], {"gpu_memory_utilization": 0.45},
         ["1 GPU(s) shared: 0.501 of one per verifier, 0.499 per drafter, gpu_memory_utilization 0.45"]),
        # A verifier with a GPU of its own has all its memory.
        ((2, 3), 3, [1, 1, 0.333, 0.333, 0.333], {}, ["3 GPU(s) shared: 1 of one per verifier, 0.333 per drafter"]),
    ],
)  # fmt: skip
def test_drafters_share_what_verifiers_leave_of_the_gpus(
    members: tuple[int, int], gpus: int, shares: list[float], memory: dict[str, float], notes: list[str]
) -> None:
    decided = decide({"verifiers": members[0], "drafters": members[1]}, gpus=float(gpus))
    assert [(m.cores, m.num_gpus, m.env) for m in decided.members] == [([], share, {}) for share in shares]
    assert (decided.settings.drafting.gpus, decided.settings.verifier.engine_args) == (shares[-1], memory)
    assert decided.notes == notes


def packed(members: Iterable[MemberPlan], gpus: int) -> list[list[str]]:
    """Who is on which GPU, as Ray places members in this order; fails where one does not fit.

    A member that takes whole GPUs gets unused ones, a part of a GPU comes from the fullest that has room.
    """
    free, held = [10_000] * gpus, [list[str]() for _ in range(gpus)]
    for member in members:
        want = round(10_000 * member.num_gpus)
        fitting = sorted((i for i in range(gpus) if free[i] >= min(want, 10_000)), key=free.__getitem__)
        count = max(1, want // 10_000)
        assert not want or len(fitting) >= count, f"{member.member_id} does not fit beside {held}"
        for gpu in fitting[:count] if want else []:
            free[gpu] -= min(want, 10_000)
            held[gpu].append(member.member_id)
    return held


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 12), st.sampled_from([None, 0.2, 0.34, 0.4, 0.7, 1.0]))
def test_every_planned_member_fits_on_a_gpu(gpus: int, verifiers: int, drafters: int, each: float | None) -> None:
    changes = {"verifiers": verifiers, "drafters": drafters, "mode": "auto" if drafters else "off", "drafting": {"gpus": each}}
    try:
        decided = decide(changes, gpus=float(gpus))
    except LaunchError:
        assert each is not None or verifiers + drafters > 6 * gpus
        return
    verified = [sum(name.startswith("verifier") for name in held) for held in packed(decided.members, gpus)]
    assert max(verified) <= -(-verifiers // gpus), "verifiers have a GPU of their own where there are as many GPUs"
    if decided.verifier_gpus == 1:
        packed(reversed(decided.members), gpus)


@pytest.mark.parametrize("each", [0.1, 0.3, 0.4, 0.5, 0.7, 1.0])
def test_auto_counts_parts_that_lie_on_one_gpu(each: float) -> None:
    for gpus in range(2, 9):
        for verifiers in ["auto", *range(1, gpus)]:
            changes = {"verifiers": verifiers, "drafters": "auto", "drafting": {"gpus": each}}
            assert all(packed(decide(changes, gpus=float(gpus)).members, gpus)), "a GPU is left unused"
    assert decide({"drafters": "auto", "drafting": {"gpus": 0.4}}, gpus=3.0).settings.drafters == 4
    assert packed(decide({"verifiers": 2}, gpus=2.0).members, 2) == [["verifier-0", "drafter-0"], ["verifier-1"]]


def test_an_ngram_drafter_needs_no_gpu_but_a_draft_model_beside_it_does() -> None:
    decided = decide({"drafter": "ngram"}, ResolvedModels("/t", None, "ngram"), gpus=1.0)
    assert [m.num_gpus for m in decided.members] == [1.0, 0.0]
    two = (OwnDrafter(None, "ngram", "ngram"), OwnDrafter("/d", "draft_model", "model"))
    models = ResolvedModels("/t", None, "ngram", "demo", two)
    decided = decide({"drafter": "ngram,model", "drafters": 2}, models, gpus=4.0)
    assert [m.num_gpus for m in decided.members] == [1.0, 1.0, 1.0]


@given(st.sets(st.integers(0, 63), min_size=1, max_size=16), st.integers(1, 4), st.integers(0, 4), st.integers(1, 5))
def test_cores_are_disjoint_while_they_last(available: set[int], verifiers: int, drafters: int, each: int) -> None:
    cores = sorted(available)
    decided = decide({"verifiers": verifiers, "drafters": drafters, "verifier": {"cores": each}}, cores=cores)
    wanted = [each] * verifiers + [1] * drafters
    assert [len(member.cores) for member in decided.members] == [min(count, len(cores)) for count in wanted]
    used = Counter(core for member in decided.members for core in member.cores)
    assert used.keys() <= available
    assert max(used.values()) - min(used[core] for core in cores) <= 1


def test_ports_and_interfaces_are_the_members_own_to_find() -> None:
    assert tcp_address(TransportSettings(), "10.0.0.1") == "tcp://10.0.0.1:0"
    assert tcp_address(TransportSettings(host="::1"), "10.0.0.1") == "tcp://[::1]:0"
    assert tcp_address(TransportSettings(host="eth1", ports="20000-20009"), "10.0.0.1") == "tcp://eth1:20000-20009"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"transport": {"host": host}}, "expected") for host in ("0.0.0.0", "::")),
        *(({"transport": {"ports": ports}}, "expected") for ports in ("5", "9-5", "0-5", "1-70000")),
        *(({"verifier": {"ray_resources": wrong}}, "resource|more than 0") for wrong in ({"GPU": 1}, {"big": 0})),
        *((changes, "needs") for changes in ({"verifier": {"tensor_parallel": 2}}, {"drafting": {"gpus": 2}})),
        ({}, "too long"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    runtime = Path("/" + "x" * 100) if message == "too long" else RUNTIME
    with pytest.raises((ValueError, LaunchError), match=message):
        plan(Settings.model_validate(changes), EAGLE, Hardware([0, 1], 1.0, True), runtime)


def test_ranks_share_the_cores_and_have_a_gpu_each_and_resources_of_ones_own_put_members_somewhere() -> None:
    on_cpu = decide({"verifier": {"tensor_parallel": 2}}, cores=[0, 1, 2]).members[0]
    assert (on_cpu.cores, on_cpu.env) == ([0, 1], {"OMP_NUM_THREADS": "1"})
    more = decide({"verifier": {"tensor_parallel": 2, "cores": 4}}, local=False).members[0]
    assert (more.num_cpus, more.env) == (4, {"OMP_NUM_THREADS": "2"})
    decided = decide({"verifier": {"tensor_parallel": 2}}, gpus=3.0)
    assert [(m.num_gpus, m.env) for m in decided.members] == [(2.0, {}), (1.0, {})]
    changes = {"verifier": {"ray_resources": {"big": 1}}, "drafting": {"ray_resources": {"small": 0.5}}}
    assert [m.resources for m in decide(changes, local=False).members] == [{"big": 1}, {"small": 0.5}]


@pytest.mark.parametrize(
    ("changes", "hardware", "counts"),
    [
        ({}, {}, (1, 1)),
        ({"mode": "native", "drafters": 3}, {}, (2, 0)),
        ({}, {"cores": list(range(8))}, (7, 1)),
        ({"verifier": {"cores": 3}}, {"cores": list(range(8))}, (2, 2)),
        ({}, {"gpus": 8.0}, (7, 1)),
        ({"verifier": {"tensor_parallel": 3}}, {"gpus": 8.0}, (2, 2)),
        ({"drafters": 4}, {"gpus": 8.0}, (4, 4)),
        ({"mode": "off"}, {"gpus": 8.0}, (8, 0)),
        ({}, {"cores": list(range(8)), "local": False, "cpus": 16.0}, (15, 1)),
        ({}, {"cores": list(range(64)), "local": False, "cpus": 8.0}, (7, 1)),
        ({"drafter": "ngram"}, {"gpus": 8.0}, (8, 1)),
        ({"drafter": "a,b"}, {"gpus": 8.0}, (6, 2)),
        ({"drafter": "a,b", "verifiers": 7}, {"gpus": 8.0}, (7, 2)),
        ({"drafter": "a,b"}, {"gpus": 1.0}, (1, 2)),
        ({"drafter": "a,b"}, {}, (1, 2)),
    ],
)
def test_counts_follow_from_the_devices_and_models(
    changes: dict[str, Any], hardware: dict[str, Any], counts: tuple[int, int]
) -> None:
    two = tuple(OwnDrafter(directory, "eagle", directory) for directory in ("/a", "/b"))
    own = {"ngram": ResolvedModels("/t", None, "ngram"), "a,b": ResolvedModels("/t", "/a", "eagle", "demo", two)}
    models = own.get(changes.get("drafter", ""), EAGLE)
    kinds = [m.kind for m in decide({"verifiers": "auto", "drafters": "auto", **changes}, models, **hardware).members]
    assert (kinds.count("verifier"), kinds.count("drafter")) == counts
