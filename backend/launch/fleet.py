"""A fleet: coordinator, verifiers and drafters as Ray actors, from the first to the last moment.  The launcher's process.

`Fleet.launch` starts them all at once, `wait_ready` watches until every one of them serves, `stop` leaves nothing behind.  Ray
restarts an actor that dies; an actor whose constructor raises is not restarted, and then `wait_ready` says why in one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from backend.config import Settings, environment
from backend.coordinator import CoordinatorUnavailable, FleetInfo
from backend.coordinator.actor import CoordinatorHandle
from backend.fleet import FleetSnapshot, Member, MemberKind
from backend.launch import state
from backend.launch.cluster import RayCluster
from backend.launch.plan import FleetPlan, Hardware, MemberPlan, PlanError, plan
from backend.models import ResolvedModels
from backend.transport import new_server_keys

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_TIMEOUT_S = 1800.0
STARTS_ALLOWED = 3
"""A member that dies more often than this while it starts will not get further."""
STOP_TIMEOUT_S = 10.0
LONGEST_CAUSE = 500
EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure): ")

Say = Callable[[str], None]


class LaunchError(Exception):
    """The fleet cannot run; the message is one line."""


def member_environment(offline: bool) -> dict[str, str]:
    """What every process of a fleet finds in its environment."""
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
class _Started:
    """One actor while it starts."""

    plan: MemberPlan
    actor: Any
    ready_ref: Any
    began: float
    incarnations: set[str] = field(default_factory=set)
    ready: bool = False


@dataclass
class Fleet:
    """A running fleet and everything it owns."""

    cluster: RayCluster
    coordinator: CoordinatorHandle
    plan: FleetPlan
    models: ResolvedModels
    runtime_dir: Path
    _members: list[_Started] = field(default_factory=list)
    _file: Path | None = None

    @classmethod
    def launch(cls, settings: Settings, models: ResolvedModels, say: Say) -> Fleet:
        """Starts Ray, the coordinator and every member, and returns while they load.  Raises `LaunchError`.

        Also `ClusterError`, `PlanError` and `StateError`, all with one line; nothing is left running then.
        """
        state.running()  # removes what dead fleets left
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
            for member in decided.members:
                fleet._members.append(_start(member, decided.settings, models, cluster.namespace))
        except BaseException:
            fleet.stop()
            raise
        return fleet

    @property
    def settings(self) -> Settings:
        """The settings with hardware defaults filled in."""
        return self.plan.settings

    def announce(self, url: str) -> None:
        """Writes the file by which other commands find this fleet."""
        directories = [str(self.runtime_dir), *([str(self.cluster.temp_dir)] if self.cluster.temp_dir else [])]
        self._file = state.write(state.FleetFile(os.getpid(), self.cluster.namespace, self.cluster.address, url, directories))

    def wait_ready(self, say: Say, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when every member serves.  Raises `LaunchError` with the cause when one cannot."""
        deadline = time.monotonic() + timeout_s
        while not all(member.ready for member in self._members):
            if time.monotonic() > deadline:
                late = ", ".join(m.plan.member_id for m in self._members if not m.ready)
                raise LaunchError(f"not ready after {timeout_s:g} s: {late}")
            self._raise_if_one_failed()
            with contextlib.suppress(CoordinatorUnavailable):
                self._note_progress(self.coordinator.snapshot(), say)
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends every actor, Ray (when it is ours) and the runtime directory.  Never raises; may be called twice."""
        began = [member for member in self._members if member.ready]
        with contextlib.suppress(ray.exceptions.RayError):
            goodbyes = [member.actor.stop.remote() for member in began]
            if goodbyes:
                ray.wait(goodbyes, num_returns=len(goodbyes), timeout=STOP_TIMEOUT_S)
        for member in self._members:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(member.actor, no_restart=True)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            self.coordinator.kill()
        self._members.clear()
        self.cluster.close()
        shutil.rmtree(self.runtime_dir, ignore_errors=True)
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _raise_if_one_failed(self) -> None:
        by_ref = {member.ready_ref: member for member in self._members if not member.ready}
        done, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
        for ref in done:
            member = by_ref[ref]
            try:
                ray.get(ref)
            except ray.exceptions.ActorUnavailableError:
                member.ready_ref = member.actor.__ray_ready__.remote()
            except ray.exceptions.RayError as error:
                raise LaunchError(f"{member.plan.member_id} failed to start: {cause(error)}") from error

    def _note_progress(self, snapshot: FleetSnapshot, say: Say) -> None:
        views = {view.member.id: view.member for view in snapshot.members}
        for started in self._members:
            view = views.get(started.plan.member_id)
            if view is None or started.ready:
                continue
            name, seconds = started.plan.member_id, time.monotonic() - started.began
            if view.incarnation not in started.incarnations:
                started.incarnations.add(view.incarnation)
                again = f" (start {len(started.incarnations)})" if len(started.incarnations) > 1 else ""
                say(f"{name}: process up in {seconds:.1f} s, loading{again}")
            if len(started.incarnations) > STARTS_ALLOWED:
                raise LaunchError(f"{name} died {STARTS_ALLOWED} times while starting")
            if view.state == "ready":
                started.ready = True
                say(f"{name}: ready in {seconds:.1f} s")


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
    )


def cause(error: BaseException) -> str:
    """The part of a Ray error that tells a person what happened, on one line."""
    if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        return _one_line(f"{type(error.cause).__name__}: {error.cause}")
    lines = str(error).splitlines()
    # A constructor's error is in the text: its traceback, then the exception, which may go over several lines.
    starts = [number for number, line in enumerate(lines) if EXCEPTION_LINE.match(line)]
    return _one_line(" ".join(lines[starts[-1] :] if starts else lines[-1:])) or type(error).__name__


def _one_line(text: str) -> str:
    text = " ".join(text.split()).partition(" For further information visit")[0]
    return text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."


def _token(ray_address: str | None) -> str | None:
    """Our token for a cluster of our own; a cluster that others run has its own ways."""
    return state.ray_token() if ray_address is None else None


def _hardware(cluster: RayCluster) -> Hardware:
    nodes = cluster.nodes
    return Hardware(sorted(os.sched_getaffinity(0)), cluster.gpus, nodes, cluster.host, local=cluster.ours)


def _plan_when_there_is_room(
    settings: Settings, models: ResolvedModels, cluster: RayCluster, runtime_dir: Path, say: Say
) -> FleetPlan:
    """The plan; a cluster that others are still joining gets `ray.wait_s` to become large enough for it."""
    deadline = time.monotonic() + (0.0 if cluster.ours else settings.ray.wait_s)
    waiting = False
    while True:
        try:
            decided = plan(settings, models, _hardware(cluster), runtime_dir)
            _check_room(decided, cluster)
            return decided
        except (PlanError, LaunchError) as error:
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
        return CoordinatorHandle.create(cluster.namespace, decided.settings.coordinator.lease_s, info)
    except CoordinatorUnavailable as error:
        raise LaunchError(str(error)) from error


def _actor_class(kind: MemberKind) -> type[Any]:
    # Imported here: a tool that only looks at fleets needs neither.
    from backend.launch.members import Drafter, Verifier

    return Verifier if kind == "verifier" else Drafter


def _start(member: MemberPlan, settings: Settings, models: ResolvedModels, namespace: str) -> _Started:
    remote = ray.remote(_actor_class(member.kind)).options(
        name=member.member_id,
        namespace=namespace,
        num_cpus=member.num_cpus,
        num_gpus=member.num_gpus,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=2,
        runtime_env={"env_vars": member.env},
    )
    began = time.monotonic()
    actor = remote.remote(
        member_id=member.member_id,
        settings=settings.model_dump_json(),
        paths=models,
        address=member.address,
        namespace=namespace,
        cores=member.cores,
    )
    return _Started(member, actor, actor.__ray_ready__.remote(), began)
