"""What runs behind Ray without an engine: the coordinator's calls, restarts and errors; rooms."""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import ray

from backend.coordinator import CoordinatorUnavailable, FleetInfo, actor
from backend.coordinator.actor import NAME, CoordinatorHandle
from backend.fleet import DrafterStats, Member, MemberKind, VerifierStats
from backend.launch.cluster import RayCluster
from backend.launch.fleet import member_environment
from backend.launch.plan import LaunchError, MemberPlan
from backend.launch.rooms import Group, ReservedBundles, arrange
from backend.launch.state import ray_token
from backend.models.resolve import ResolvedModels
from backend.transport.sockets import ServerKeys
from tests.support.fleet_process import wait_for

pytestmark = pytest.mark.engine

INFO = FleetInfo("{}", ResolvedModels("/target", None, "ngram", "demo"), ServerKeys("public", "secret"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with (
        # However long a call takes on a busy machine.
        patch.object(actor, "CALL_TIMEOUT_S", 120.0),
        contextlib.closing(RayCluster.open(None, "test-coordinator", member_environment(), ray_token())) as cluster,
    ):
        yield cluster


def inside(cluster: RayCluster, run: Callable[[Any], Any]) -> Any:
    """Runs this in the coordinator's process."""
    return ray.get(ray.get_actor(NAME, namespace=cluster.namespace).__ray_call__.remote(run))


def keep_members(cluster: RayCluster) -> None:
    """Members stay however much time passes between a test's calls."""
    inside(cluster, lambda self: setattr(self._policy, "lease_s", math.inf))


def member(member_id: str, kind: MemberKind, incarnation: str = "i0") -> Member:
    return Member(member_id, kind, incarnation, "ipc:///x", "", "node", 1, "demo", "ready")


def test_the_coordinators_life(cluster: RayCluster) -> None:
    with pytest.raises(CoordinatorUnavailable, match="no fleet"):
        CoordinatorHandle.connect("nobody-here", timeout_s=0.2)
    coordinator = CoordinatorHandle.create(cluster.namespace, INFO)
    keep_members(cluster)
    with pytest.raises(CoordinatorUnavailable, match="already running"):
        CoordinatorHandle.create(cluster.namespace, INFO)
    other = CoordinatorHandle.connect(cluster.namespace, timeout_s=120)
    assert other.info() == INFO
    other.register(member("v0", "verifier"))
    coordinator.register(member("d0", "drafter"))
    orders = other.report("v0", "i0", VerifierStats("v0", 0.0, "sync", 4, running=2), "ready")
    assert [ref.id for ref in orders.drafters] == ["d0"]
    assert other.report("d0", "i0", DrafterStats("d0", 0.0, batches=3), "ready").known
    before = coordinator.snapshot()
    assert {v.member.id: v.member.state for v in before.members} == {"v0": "ready", "d0": "ready"}
    assert before.members[0].drafter is not None
    assert before.members[0].drafter.batches == 3
    # After a crash it knows nobody, and still has the keys.
    os.kill(inside(cluster, lambda self: os.getpid()), signal.SIGKILL)
    wait_for(lambda: _answers(coordinator))
    keep_members(cluster)
    assert not coordinator.report("v0", "i0", None, "ready").known
    assert coordinator.info() == INFO
    coordinator.register(member("v0", "verifier"))
    coordinator.register(member("d0", "drafter"))
    assert coordinator.snapshot().assignments[0].generation > before.assignments[0].generation
    other.deregister("d0", "i0")
    assert coordinator.snapshot().assignments == []
    coordinator.kill()
    wait_for(lambda: not _answers(coordinator))
    with pytest.raises(CoordinatorUnavailable):
        coordinator.report("v0", "i0", None, "ready")


def _answers(handle: CoordinatorHandle) -> bool:
    try:
        handle.snapshot()
    except CoordinatorUnavailable:
        return False
    return True


class Lodger:
    """A member that says in which group it is."""

    def group(self) -> str:
        return str(ray.get_runtime_context().get_placement_group_id())


def test_rooms_are_rays_placement_groups(cluster: RayCluster) -> None:
    half = cluster.cpus / 2
    remote = ray.remote(Lodger)
    kinds: list[MemberKind] = ["verifier", "drafter"]
    members = [MemberPlan(f"{kind}-0", kind, [], half, 0, "") for kind in kinds]
    further = MemberPlan("drafter-1", "drafter", [], half, 0, "")
    rooms = ReservedBundles()
    rooms.reserve(arrange(members, "near"))
    try:
        lodgers = [remote.options(num_cpus=half, scheduling_strategy=rooms.place(each)).remote() for each in members]
        one, other = ray.get([lodger.group.remote() for lodger in lodgers], timeout=120)
        assert one == other != "None"
        with pytest.raises(LaunchError, match=rf"no room for drafter-1 \({half:g} CPU\): 127.0.0.1 has nothing free"):
            rooms.reserve([Group("PACK", (further,))], timeout_s=0.5)
        ray.kill(lodgers[1])
        rooms.vacate("drafter-0")
        guest = remote.options(num_cpus=half, scheduling_strategy=rooms.place(further)).remote()
        assert ray.get(guest.group.remote(), timeout=120) == one
    finally:
        rooms.close()
    wait_for(lambda: ray.available_resources().get("CPU", 0) >= cluster.cpus, what="the room being given back")
