"""What a drafter in a verifier's place is given, and how much memory a machine has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.launch.places import lent_drafter
from backend.launch.plan import MemberPlan
from backend.verifier.memory import available_memory_mib

ON_CPU = MemberPlan("verifier-1", "verifier", [1], 0, 0, "ipc:///run/x/verifier-1.sock", {"OMP_NUM_THREADS": "1"})
ON_GPU = MemberPlan("verifier-1", "verifier", [], 4, 1, "tcp://node:0", {"OMP_NUM_THREADS": "4"})


def test_on_cores_it_has_the_verifiers_and_a_socket_of_its_own() -> None:
    plan = lent_drafter(ON_CPU, swapped=False, devices="")
    assert (plan.member_id, plan.kind, plan.cores) == ("drafter-at-verifier-1", "drafter", [1])
    assert plan.address == "ipc:///run/x/drafter-at-verifier-1.sock"
    assert plan.env == {"OMP_NUM_THREADS": "1"}


def test_beside_a_sleeping_verifier_it_asks_ray_for_nothing_and_is_told_its_gpu() -> None:
    plan = lent_drafter(ON_GPU, swapped=False, devices="3")
    assert (plan.num_cpus, plan.num_gpus, plan.address) == (0, 0, "tcp://node:0")
    assert plan.env["CUDA_VISIBLE_DEVICES"] == "3"


def test_instead_of_an_ended_verifier_it_takes_what_that_one_had() -> None:
    plan = lent_drafter(ON_GPU, swapped=True, devices="3")
    assert (plan.num_cpus, plan.num_gpus) == (4, 1)
    assert "CUDA_VISIBLE_DEVICES" not in plan.env


@pytest.mark.parametrize(("limit", "free"), [("max", 3000), (str(2000 * 2**20), 1100), (str(100 * 2**20), 0)])
def test_free_memory_is_what_the_kernel_and_the_control_group_allow(tmp_path: Path, limit: str, free: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 8192000 kB\nMemAvailable: {3000 * 1024} kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    assert available_memory_mib(tmp_path) == 3000
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{1000 * 2**20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {100 * 2**20}\n")
    assert available_memory_mib(tmp_path) == free
