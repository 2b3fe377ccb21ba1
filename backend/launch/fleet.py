"""Starts, watches and stops a fleet: coordinator, verifiers and drafters as Ray actors.  The launcher's process.

`LaunchedFleet.launch` starts all actors, those that share a verifier's GPU after that verifier serves.  `wait_ready` waits
until every one of them serves, `stop` ends everything.  Ray restarts an actor that dies.  It does not restart an actor whose
constructor raises; then `wait_ready` says why in one line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray

from backend.config import Settings, environment
from backend.config.sources import Say
from backend.coordinator import CoordinatorUnavailable, FleetInfo
from backend.coordinator.actor import CoordinatorHandle
from backend.fleet import Member, MemberKind
from backend.launch import state
from backend.launch.cluster import RayCluster
from backend.launch.plan import FleetPlan, Hardware, LaunchError, MemberPlan, plan
from backend.launch.processes import Started, start, stop
from backend.launch.rooms import ReservedBundles, arrange
from backend.models.resolve import ResolvedModels
from backend.transport import new_server_keys

POLL_S = 0.2
START_TIMEOUT_S = 1800.0


def member_environment() -> dict[str, str]:
    """Environment variables for every process of a fleet."""
    return {
        "PYTHONPATH": environment.python_path_with(Path(__file__).resolve().parents[2]),
        # Members use the GPUs that Ray has reserved for them; trainers' frameworks switch that off for actors of their own.
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **environment.users_choice({"VLLM_LOGGING_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def prepare_process() -> None:
    """Sets environment variables for this process.  It has no engine, so vLLM's log lines about one are suppressed."""
    environment.export({"VLLM_LOGGING_LEVEL": "ERROR"}, override=False)
    environment.export(member_environment())


@dataclass
class LaunchedFleet:
    """A running fleet and everything it owns."""

    cluster: RayCluster
    coordinator: CoordinatorHandle
    plan: FleetPlan
    info: FleetInfo
    members: dict[str, Started] = field(default_factory=dict)
    """By member id; the operator's thread changes it once the fleet serves."""
    rooms: ReservedBundles = field(default_factory=ReservedBundles)
    """Reserved room; none in a cluster of our own, where all room is the fleet's."""
    ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What `stop` does, the last first."""

    @classmethod
    def launch(cls, settings: Settings, models: ResolvedModels, say: Say) -> LaunchedFleet:
        """Starts Ray, the coordinator and every member, and returns while the last of them load.

        Raises a `CommandError`; then nothing is left running.
        """
        state.running()  # removes the files of dead fleets
        with contextlib.ExitStack() as ending:
            # The file goes last: if this process is killed before, another command finds and removes the directories.
            ending.callback(state.file_of(settings.ray.namespace, os.getpid()).unlink, missing_ok=True)
            runtime_dir = state.new_runtime_directory()
            ending.callback(shutil.rmtree, runtime_dir, ignore_errors=True)
            began = time.monotonic()
            # A cluster to join has an authentication of its own.
            token = state.ray_token() if settings.ray.address is None else None
            cluster = RayCluster.open(settings.ray.address, settings.ray.namespace, member_environment(), token)
            ending.callback(cluster.close)
            where = f"joined {cluster.address}" if not cluster.ours else "up"
            say(f"Ray {where} in {time.monotonic() - began:.1f} s")
            decided = _plan_for(cluster, settings, models, runtime_dir)
            for note in decided.notes:
                say(note)
            # Members listen on tcp, and need keys, where there may be further nodes.
            keys = None if cluster.ours else new_server_keys()
            info = FleetInfo(decided.settings.model_dump_json(), models, keys)
            coordinator = CoordinatorHandle.create(cluster.namespace, info)
            ending.callback(coordinator.kill)
            fleet = cls(cluster, coordinator, decided, info)
            fleet.announce("")
            ending.callback(fleet._end_members)
            if not cluster.ours:
                fleet.rooms.reserve(arrange(decided.members, settings.ray.placement))
            fleet._start_members(say)
            coordinator.wait_started()
            fleet.ending = ending.pop_all()
        return fleet

    def _start_members(self, say: Say) -> None:
        """Starts all members; one that may share a verifier's GPU waits until that verifier serves.

        A starting vLLM takes all memory that vanishes from its GPU for its own, and so has less for its KV cache.
        """
        for member in self.plan.members:
            if verifiers := [each for each in self.members.values() if each.plan.may_share(member)]:
                self.coordinator.wait_started()
                self.wait_ready(say, verifiers)
            self.start(member)

    @property
    def settings(self) -> Settings:
        """The settings with hardware defaults filled in."""
        return self.plan.settings

    def announce(self, url: str) -> None:
        """Writes the file by which other commands find this fleet; with a URL, also the file of the program that started it."""
        cluster = self.cluster
        directories = [str(each) for each in (self.plan.runtime_dir, cluster.temp_dir) if each is not None]
        state.write(state.FleetFile(os.getpid(), cluster.namespace, cluster.address, url, directories, cluster.ours))
        if url and (ready_file := environment.ready_file()) is not None:
            ready_file.write_text(url, encoding="utf-8")

    def wait_ready(
        self, say: Say, members: Sequence[Started] | None = None, unless: Callable[[], bool] = lambda: False
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
            for member in starting:
                self._check(member)
            with contextlib.suppress(CoordinatorUnavailable):
                snapshot = self.coordinator.snapshot()
                for member in starting:
                    if (line := member.progress(snapshot)) is not None:
                        say(line)
            time.sleep(POLL_S)

    def _check(self, member: Started) -> None:
        if (why := member.death()) is not None:
            hint = ". CUDA_VISIBLE_DEVICES names other GPUs" if "Free memory on device" in why else ""
            logs = self.cluster.keep_logs()
            kept = f" (logs: {logs})" if logs is not None else ""
            raise LaunchError(f"{member.member_id} failed to start: {why}{hint}{kept}")

    def add(self, kind: MemberKind) -> Started:
        """Starts one more member.  Raises `LaunchError` where there is no room for it."""
        member = self.plan.further(kind, [each.plan for each in self.members.values()])
        if self.cluster.ours:
            self.rooms.check(member)
        return self.start(member)

    def start(self, member: MemberPlan) -> Started:
        """Starts a member in its reserved room, and forgets an earlier member of that name."""
        place = None if self.cluster.ours else self.rooms.place(member)
        started = start(member, self.info, self.cluster.namespace, place)
        self.members[member.member_id] = started
        return started

    def end(self, member_id: str, keep_room: bool = False) -> None:
        """Ends a member; with `keep_room` its room stays reserved, so that it can be started again."""
        stop([self.members.pop(member_id)])
        if not keep_room:
            self.rooms.vacate(member_id)

    def stop(self) -> None:
        """Ends every actor and our own Ray cluster, and removes the runtime directory.  May be called twice."""
        self.ending.close()

    def _end_members(self) -> None:
        stop(list(self.members.values()))
        self.members.clear()
        self.rooms.close()


def cluster_address() -> tuple[str, str]:
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


def _plan_for(cluster: RayCluster, settings: Settings, models: ResolvedModels, runtime_dir: Path) -> FleetPlan:
    """The plan.  Raises `LaunchError` if the cluster has too few devices for it."""
    hardware = Hardware(sorted(os.sched_getaffinity(0)), cluster.gpus, cluster.ours, cluster.cpus)
    decided = plan(settings, models, hardware, runtime_dir)
    need = sum(member.num_cpus for member in decided.members)
    if need > hardware.cpus:
        raise LaunchError(f"the fleet needs {need:g} CPUs and the Ray cluster has {hardware.cpus:g}")
    return decided
