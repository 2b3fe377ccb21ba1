"""Starts one member's process, watches it until it serves, and stops it.  The launcher's process.

Ray restarts an actor that dies.  It gives up an actor whose constructor raises; `death` says why in one line.
"""

import contextlib
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from backend.coordinator import FleetInfo
from backend.drafter.actor import DrafterActor
from backend.fleet import FleetSnapshot
from backend.launch.plan import LaunchError, MemberPlan
from backend.verifier.actor import VerifierActor

STARTS_ALLOWED = 3
"""Start attempts of one member; after so many deaths while starting, the launch fails."""
STOP_TIMEOUT_S = 10.0
LONGEST_CAUSE = 500
EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure): ")


@dataclass
class Started:
    """A member's actor that has been started; it may still load."""

    plan: MemberPlan
    actor: Any
    answer: Any
    """What the actor will answer as soon as its constructor has returned."""
    began: float
    incarnations: set[str] = field(default_factory=set)
    ready: bool = False

    @property
    def member_id(self) -> str:
        return self.plan.member_id

    def death(self) -> str | None:
        """Why Ray has given the actor up, on one line; None: it has not, as far as is known.  Never waits."""
        try:
            ray.get(self.answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.ActorUnavailableError:
            pass
        except ray.exceptions.RayError as error:
            return cause(error)
        self.answer = self.actor.__ray_ready__.remote()
        return None

    def progress(self, snapshot: FleetSnapshot) -> str | None:
        """A line about the actor's progress since the last call, if there is any; sets `ready`.

        Raises `LaunchError` if the member dies again and again while it starts.
        """
        view = snapshot.view(self.member_id)
        if view is None or view.member.state == "lost" or self.ready:
            return None
        seconds = time.monotonic() - self.began
        if view.member.incarnation not in self.incarnations:
            self.incarnations.add(view.member.incarnation)
            if len(self.incarnations) > STARTS_ALLOWED:
                raise LaunchError(f"{self.member_id} died {STARTS_ALLOWED} times while starting")
            again = f" (start {len(self.incarnations)})" if len(self.incarnations) > 1 else ""
            return f"{self.member_id}: process up in {seconds:.1f} s, loading{again}"
        if view.member.state in ("ready", "draining"):
            self.ready = True
            return f"{self.member_id}: ready in {seconds:.1f} s"
        return None


def start(member: MemberPlan, info: FleetInfo, namespace: str, place: Any = None) -> Started:
    """Starts a member's actor.  `place` is a Ray scheduling strategy, None for Ray's default."""
    remote = ray.remote(VerifierActor if member.kind == "verifier" else DrafterActor).options(
        # For people who look at the cluster.  Ray keeps the name of an actor that was ended for a moment.
        name=f"{member.member_id}-{uuid.uuid4().hex[:8]}",
        namespace=namespace,
        num_cpus=member.num_cpus,
        num_gpus=member.num_gpus,
        resources=member.resources or None,
        scheduling_strategy=place,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=2,
        runtime_env={"env_vars": member.env},
    )
    actor = remote.remote(
        member_id=member.member_id, info=info, address=member.address, namespace=namespace, cores=member.cores
    )
    return Started(member, actor, actor.__ray_ready__.remote(), time.monotonic())


def stop(members: list[Started]) -> None:
    """Ends members permanently.  Members that serve first get `STOP_TIMEOUT_S` to leave the fleet."""
    with contextlib.suppress(ray.exceptions.RayError):
        goodbyes = [member.actor.stop.remote() for member in members if member.ready]
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=STOP_TIMEOUT_S)
    for member in members:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(member.actor, no_restart=True)


def cause(error: BaseException) -> str:
    """The part of a Ray error that says what happened, on one line of at most `LONGEST_CAUSE` characters."""
    if isinstance(error, ray.exceptions.RayTaskError) and error.cause is not None:
        return _one_line(f"{type(error.cause).__name__}: {error.cause}")
    lines = str(error).splitlines()
    # A constructor's error is in the text: first the traceback, then the exception, which may have several lines.
    starts = [number for number, line in enumerate(lines) if EXCEPTION_LINE.match(line)]
    return _one_line(" ".join(lines[starts[-1] :] if starts else lines[-1:])) or type(error).__name__


def _one_line(text: str) -> str:
    text = " ".join(text.split()).partition(" For further information visit")[0]
    return text if len(text) <= LONGEST_CAUSE else text[: LONGEST_CAUSE - 3] + "..."
