"""Starts one member's process, watches it until it serves, and stops it.  The launcher's process.

Ray restarts an actor that dies.  It gives up an actor whose constructor raises; `check` and `death` say why in one line.
"""

import contextlib
import re
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions

from backend.config import Settings
from backend.drafter.actor import DrafterActor
from backend.fleet import FleetSnapshot
from backend.launch.plan import LaunchError, MemberPlan
from backend.models.resolve import ResolvedModels
from backend.verifier.actor import VerifierActor

STARTS_ALLOWED = 3
"""Start attempts of one member; after so many deaths while starting, the launch fails."""
STOP_TIMEOUT_S = 10.0
NAME_TIMEOUT_S = 10.0
"""Seconds to wait for an actor's name: Ray frees the name of an ended actor only a moment later."""
ANSWER_TIMEOUT_S = 1.0
LONGEST_CAUSE = 500
EXCEPTION_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure): ")


@dataclass
class Started:
    """A member's actor that has been started; it may still load."""

    plan: MemberPlan
    actor: Any
    ready_ref: Any
    began: float
    incarnations: set[str] = field(default_factory=set)
    ready: bool = False

    @property
    def member_id(self) -> str:
        return self.plan.member_id

    def check(self) -> None:
        """Raises `LaunchError` if the actor's constructor has raised."""
        try:
            ray.get(self.ready_ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            return
        except ray.exceptions.ActorUnavailableError:
            self.ready_ref = self.actor.__ray_ready__.remote()
        except ray.exceptions.RayError as error:
            why = cause(error)
            hint = ". CUDA_VISIBLE_DEVICES names other GPUs" if "Free memory on device" in why else ""
            raise LaunchError(f"{self.member_id} failed to start: {why}{hint}") from error

    def death(self) -> str | None:
        """Why Ray has given the actor up, on one line; None: it has not, as far as is known."""
        try:
            ray.get(self.actor.__ray_ready__.remote(), timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.ActorDiedError as error:
            return cause(error)
        except ray.exceptions.RayError:
            pass
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


def start(member: MemberPlan, settings: Settings, models: ResolvedModels, namespace: str, place: Any = None) -> Started:
    """Starts a member's actor; waits until its name is free.  `place` is a Ray scheduling strategy, None for Ray's default."""
    remote = ray.remote(VerifierActor if member.kind == "verifier" else DrafterActor).options(
        name=member.member_id,
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
    began = time.monotonic()
    while True:
        try:
            actor = remote.remote(
                member_id=member.member_id,
                settings=settings.model_dump_json(),
                paths=models,
                address=member.address,
                namespace=namespace,
                cores=member.cores,
            )
            break
        except ValueError:
            if time.monotonic() - began > NAME_TIMEOUT_S:
                raise
            time.sleep(0.1)
    return Started(member, actor, actor.__ray_ready__.remote(), began)


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
