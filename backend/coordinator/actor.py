"""The coordinator as a Ray actor, and the handle through which all other processes call it.

`CoordinatorActor` runs in a process of its own, one call at a time, so the policy needs no lock.  It has no loop either: leases
are checked at every call, and members call several times a second.  Ray restarts it when it dies: constructor arguments bring
the fleet's keys back, unknown members register again, and serving goes on meanwhile.  `CoordinatorHandle` is used by members,
gateways and tools, from any thread.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from backend.config import REMOTE_MODES, Settings
from backend.coordinator.administration import Administration
from backend.coordinator.commands import Answer, AnyCommand
from backend.coordinator.messages import CoordinatorUnavailable, FleetInfo
from backend.coordinator.policy import Coordinator
from backend.fleet import DrafterStats, FleetSnapshot, Member, MemberState, Operation, Orders, VerifierStats

P = ParamSpec("P")
T = TypeVar("T")

NAME = "outrider-coordinator"
CALL_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0


class CoordinatorActor:
    """The policy with a real clock."""

    def __init__(self, info: FleetInfo) -> None:
        self._info = info
        settings = Settings.model_validate_json(info.settings_json)
        # The first version is the wall clock in milliseconds, so versions go on growing when Ray restarts this actor.
        self._policy = Coordinator(first_version=time.time_ns() // 1_000_000)
        drain_s = settings.gateway.drain_s
        self._administration = Administration(self._policy, drain_s, settings.mode in REMOTE_MODES, uuid.uuid4().hex)

    def register(self, member: Member) -> None:
        """Joins the fleet, perhaps again."""
        self._policy.register(member, time.monotonic())

    def report(
        self,
        member_id: str,
        incarnation: str,
        stats: VerifierStats | DrafterStats | None,
        state: MemberState,
        seen_version: int = 0,
    ) -> Orders:
        """Renews this member's lease.  `known=False` in the answer: register again.

        `seen_version`: from a gateway, the version of the snapshot that it acts on.
        """
        return self._policy.report(member_id, incarnation, stats, state, time.monotonic(), seen_version)

    def deregister(self, member_id: str, incarnation: str) -> None:
        """Leaves the fleet."""
        self._policy.deregister(member_id, incarnation, time.monotonic())

    def drain(self, member_id: str, migrate_after_s: float) -> None:
        """Orders a drain, see `Coordinator.drain`.  For the launcher; administrators use `submit`."""
        self._policy.drain(member_id, time.monotonic(), migrate_after_s)

    def resume(self, member_id: str) -> None:
        """Ends a drain.  For the launcher; administrators use `submit`."""
        self._policy.resume(member_id, time.monotonic())

    def restore(self, before: FleetSnapshot) -> None:
        """Tells a restarted coordinator the drains and pins of an earlier snapshot.  For the launcher."""
        self._policy.restore(before, time.monotonic())

    def submit(self, command: AnyCommand) -> Answer:
        """Has the coordinator check and take an administrator's command."""
        return self._administration.submit(command, time.monotonic())

    def progress(self, report: Operation | None = None) -> Operation | None:
        """For the launcher: reports how an operation stands, if one is given, and returns the operation to work on."""
        if report is not None:
            self._administration.progress(report)
        return self._administration.next_operation()

    def snapshot(self) -> FleetSnapshot:
        """The fleet as the coordinator sees it now."""
        return self._administration.snapshot(time.monotonic())

    def info(self) -> FleetInfo:
        """The settings, models and keys that the fleet was launched with."""
        return self._info


def _remote(method: Callable[Concatenate[CoordinatorActor, P], T]) -> Callable[Concatenate[CoordinatorHandle, P], T]:
    """The handle's method that calls this one of the actor."""
    name = method.__name__

    def call(handle: CoordinatorHandle, /, *given: P.args, **named: P.kwargs) -> T:
        try:
            if handle.actor is None:
                handle.actor = _find(handle.namespace)
            answer: T = ray.get(getattr(handle.actor, name).remote(*given, **named), timeout=handle.timeout_s)
            return answer
        except ray.exceptions.RayTaskError as error:
            raise CoordinatorUnavailable(f"the coordinator failed at {name}: {error.cause}") from error
        except ray.exceptions.ActorDiedError as error:
            # It will not come back: a later coordinator of this name is another actor.
            handle.actor = None
            raise CoordinatorUnavailable("the coordinator is gone") from error
        except ray.exceptions.GetTimeoutError as error:
            raise CoordinatorUnavailable(f"the coordinator did not answer within {handle.timeout_s:g} s") from error
        except (ray.exceptions.RayError, ray.exceptions.RaySystemError) as error:
            raise CoordinatorUnavailable(f"the coordinator cannot be reached: {type(error).__name__}") from error

    return call


class CoordinatorHandle:
    """`CoordinatorActor`'s methods, called from elsewhere.

    Every method may raise `CoordinatorUnavailable`; none raises a Ray exception.
    """

    def __init__(self, namespace: str, actor: Any, timeout_s: float) -> None:
        self.namespace = namespace
        self.actor = actor
        self.timeout_s = timeout_s

    @classmethod
    def create(cls, namespace: str, info: FleetInfo) -> CoordinatorHandle:
        """Starts the coordinator on this node, and does not wait for it: see `wait_started`.

        The calling process owns the coordinator: the fleet ends with that process.
        """
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        options = ray.remote(CoordinatorActor).options(
            name=NAME, namespace=namespace, num_cpus=0, max_restarts=-1, max_task_retries=0, scheduling_strategy=here
        )
        try:
            actor = options.remote(info)
        except ValueError as error:
            raise CoordinatorUnavailable(f"a fleet is already running in the Ray namespace {namespace!r}") from error
        return cls(namespace, actor, CALL_TIMEOUT_S)

    @classmethod
    def connect(cls, namespace: str, timeout_s: float = CALL_TIMEOUT_S) -> CoordinatorHandle:
        """Finds the coordinator of `namespace` in the Ray cluster this process is connected to.

        Waits up to `timeout_s` for it to exist.  Later calls have the same limit each.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return cls(namespace, _find(namespace), timeout_s)
            except CoordinatorUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    def wait_started(self) -> None:
        """Returns when the coordinator that this process has created answers."""
        CoordinatorHandle(self.namespace, self.actor, START_TIMEOUT_S).snapshot()

    register = _remote(CoordinatorActor.register)
    report = _remote(CoordinatorActor.report)
    deregister = _remote(CoordinatorActor.deregister)
    drain = _remote(CoordinatorActor.drain)
    resume = _remote(CoordinatorActor.resume)
    restore = _remote(CoordinatorActor.restore)
    submit = _remote(CoordinatorActor.submit)
    progress = _remote(CoordinatorActor.progress)
    snapshot = _remote(CoordinatorActor.snapshot)
    info = _remote(CoordinatorActor.info)

    def kill(self) -> None:
        """Ends the coordinator for good, if it is still there."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)


def _find(namespace: str) -> Any:
    try:
        return ray.get_actor(NAME, namespace=namespace)
    except (ValueError, ray.exceptions.RayError) as error:
        raise CoordinatorUnavailable(f"no fleet runs in the Ray namespace {namespace!r}") from error
