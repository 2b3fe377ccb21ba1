"""Starts, watches and stops a fleet: coordinator, verifiers and drafters as Ray actors.  The launcher's process.

`Fleet.launch` starts all actors at once, `wait_ready` waits until every one of them serves, `stop` ends everything.  Ray
restarts an actor that dies.  It does not restart an actor whose constructor raises; then `wait_ready` says why in one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
import ray.exceptions

from backend.config import Settings, environment
from backend.coordinator import CoordinatorUnavailable, FleetInfo
from backend.coordinator.actor import CoordinatorHandle
from backend.fleet import Member, MemberKind
from backend.launch import state
from backend.launch.cluster import RayCluster
from backend.launch.operator import Operator
from backend.launch.placement import arrange
from backend.launch.plan import FleetPlan, Hardware, LaunchError, MemberPlan, plan, plan_further
from backend.launch.processes import STARTS_ALLOWED, Started, start, stop
from backend.launch.rooms import RESERVE_TIMEOUT_S, Rooms
from backend.models.resolve import ResolvedModels
from backend.transport import new_server_keys

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_TIMEOUT_S = 1800.0

Say = Callable[[str], None]


def member_environment(offline: bool) -> dict[str, str]:
    """Environment variables for every process of a fleet."""
    return {
        "PYTHONPATH": environment.python_path_with(Path(__file__).resolve().parents[2]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **environment.users_choice({"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}),
        **({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if offline else {}),
    }


@dataclass
class Fleet:
    """A running fleet and everything it owns."""

    cluster: RayCluster
    coordinator: CoordinatorHandle
    plan: FleetPlan
    models: ResolvedModels
    runtime_dir: Path
    members: dict[str, Started] = field(default_factory=dict)
    """By member id; the operator's thread changes it once the fleet serves."""
    rooms: Rooms | None = None
    """Reserved room; None in a cluster of our own, where all room is the fleet's."""
    _file: Path | None = None
    _operator: Operator | None = None

    @classmethod
    def launch(cls, settings: Settings, models: ResolvedModels, say: Say) -> Fleet:
        """Starts Ray, the coordinator and every member, and returns while the members load.

        Raises `LaunchError`, `ClusterError` or `StateError`, with a message of one line; then nothing is left running.
        """
        state.running()  # removes the files of dead fleets
        runtime_dir = state.new_runtime_directory()
        cluster: RayCluster | None = None
        try:
            began = time.monotonic()
            cluster = RayCluster.open(
                settings.ray.address, settings.ray.namespace, member_environment(offline=True), _token(settings.ray.address)
            )
            where = f"joined {cluster.address}" if not cluster.ours else "up"
            say(f"Ray {where} in {time.monotonic() - began:.1f} s")
            decided = _plan_when_there_is_room(settings, models, cluster, runtime_dir, say)
            for note in decided.notes:
                say(note)
            fleet = cls(cluster, _start_coordinator(cluster, decided, models), decided, models, runtime_dir)
        except BaseException:
            if cluster is not None:
                cluster.close()
            shutil.rmtree(runtime_dir, ignore_errors=True)
            raise
        try:
            fleet.announce("")
            fleet.reserve()
            for member in decided.members:
                fleet.start(member)
        except BaseException:
            fleet.stop()
            raise
        return fleet

    @property
    def settings(self) -> Settings:
        """The settings with hardware defaults filled in."""
        return self.plan.settings

    def reserve(self) -> None:
        """Reserves room for all members in a joined cluster, which others may use too.  Raises `LaunchError`."""
        if not self.cluster.ours:
            self.rooms = Rooms()
            patience_s = max(RESERVE_TIMEOUT_S, self.settings.ray.wait_s)
            self.rooms.reserve(arrange(self.plan.members, self.settings.ray.placement), patience_s)

    def announce(self, url: str) -> None:
        """Writes the file by which other commands find this fleet."""
        directories = [str(self.runtime_dir), *([str(self.cluster.temp_dir)] if self.cluster.temp_dir else [])]
        cluster = self.cluster
        self._file = state.write(
            state.FleetFile(os.getpid(), cluster.namespace, cluster.address, url, directories, cluster.ours)
        )

    def wait_ready(
        self,
        say: Say,
        members: Sequence[Started] | None = None,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Returns when these members (by default all) serve, or when `unless()` is true.

        Raises `LaunchError` with the cause when a member cannot start.
        """
        waited_for = list(self.members.values() if members is None else members)
        deadline = time.monotonic() + START_TIMEOUT_S
        while (starting := [member for member in waited_for if not member.ready]) and not unless():
            if time.monotonic() > deadline:
                late = ", ".join(member.member_id for member in starting)
                raise LaunchError(f"not ready after {START_TIMEOUT_S:g} s: {late}")
            self._note(starting, say)
            time.sleep(POLL_S)

    def operate(self, say: Say) -> None:
        """Starts the thread that carries out administrators' operations, until `stop`."""
        self._operator = Operator(self, say)
        self._operator.start()

    def add(self, kind: MemberKind) -> Started:
        """Starts one more member.  Raises `LaunchError` where there is no room for it."""
        others = [each.plan for each in list(self.members.values())]
        member = plan_further(self.plan, self.models, self.runtime_dir, kind, others)
        if self.rooms is None and not self.cluster.has_room(member.num_cpus, member.num_gpus):
            raise LaunchError(f"the Ray cluster has no room for another {kind}")
        return self.start(member)

    def start(self, member: MemberPlan, models: ResolvedModels | None = None) -> Started:
        """Starts a member in its reserved room, and forgets an earlier member of that name."""
        place = None if self.rooms is None else self.rooms.place(member)
        started = start(member, self.settings, models or self.models, self.cluster.namespace, place)
        self.members[member.member_id] = started
        return started

    def end(self, member_id: str, keep_room: bool = False) -> None:
        """Ends a member; with `keep_room` its room stays reserved, so that it can be started again."""
        stop([self.members.pop(member_id)])
        if self.rooms is not None and not keep_room:
            self.rooms.vacate(member_id)

    def stop(self) -> None:
        """Ends every actor and our own Ray cluster, and removes the runtime directory.  May be called twice."""
        if self._operator is not None:
            self._operator.stop()
        stop(list(self.members.values()))
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            self.coordinator.kill()
        self.members.clear()
        if self.rooms is not None:
            self.rooms.close()
        self.cluster.close()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _note(self, starting: Sequence[Started], say: Say) -> None:
        for member in starting:
            if (failure := member.failure()) is not None:
                raise LaunchError(failure)
        with contextlib.suppress(CoordinatorUnavailable):
            snapshot = self.coordinator.snapshot()
            for member in starting:
                if (line := member.progress(snapshot)) is not None:
                    say(line)
                if member.gave_up:
                    raise LaunchError(f"{member.member_id} died {STARTS_ALLOWED} times while starting")


def joined() -> tuple[str, str]:
    """Address and namespace of the Ray cluster that this process is part of."""
    context = ray.get_runtime_context()
    return str(context.gcs_address), str(context.namespace)


def gateway_member(model: str) -> Member:
    """This process as a gateway of the fleet."""
    incarnation = uuid.uuid4().hex
    return Member(
        id=f"gateway-{incarnation[:8]}",
        kind="gateway",
        incarnation=incarnation,
        address="",
        server_key="",
        node=str(ray.util.get_node_ip_address()),
        pid=os.getpid(),
        model=model,
        state="ready",
        node_id=str(ray.get_runtime_context().get_node_id()),
    )


def _token(ray_address: str | None) -> str | None:
    """The token of a cluster that we start; None for one to join, which has its own authentication."""
    return state.ray_token() if ray_address is None else None


def _plan_when_there_is_room(
    settings: Settings, models: ResolvedModels, cluster: RayCluster, runtime_dir: Path, say: Say
) -> FleetPlan:
    """The plan.  A cluster that nodes are still joining gets `ray.wait_s` seconds to become large enough."""
    deadline = time.monotonic() + (0.0 if cluster.ours else settings.ray.wait_s)
    waiting = False
    while True:
        try:
            hardware = Hardware(sorted(os.sched_getaffinity(0)), cluster.gpus, local=cluster.ours)
            decided = plan(settings, models, hardware, runtime_dir)
            _check_room(decided, cluster)
            return decided
        except LaunchError as error:
            if time.monotonic() >= deadline:
                raise
            if not waiting:
                say(f"waiting for the cluster to grow: {error}")
            waiting = True
        time.sleep(POLL_S)


def _check_room(decided: FleetPlan, cluster: RayCluster) -> None:
    need = sum(member.num_cpus for member in decided.members)
    if need > cluster.cpus:
        raise LaunchError(f"the fleet needs {need:g} CPUs and the Ray cluster has {cluster.cpus:g}")


def _start_coordinator(cluster: RayCluster, decided: FleetPlan, models: ResolvedModels) -> CoordinatorHandle:
    keys = new_server_keys() if decided.encrypted else None
    info = FleetInfo(decided.settings.model_dump_json(), models, keys)
    try:
        return CoordinatorHandle.create(cluster.namespace, info)
    except CoordinatorUnavailable as error:
        raise LaunchError(str(error)) from error
