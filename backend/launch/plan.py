"""Plans the members of a fleet: cores, GPUs, addresses and environment of each.

Pure; the launcher calls it at the start, and for each member that is added later.  With fewer GPUs than processes, drafters
share the GPUs that verifiers leave.  If none is left, all share, and vLLM takes only its part of a GPU's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from backend.config import REMOTE_MODES, Settings
from backend.config.sources import CommandError
from backend.fleet.members import MemberKind
from backend.models.resolve import ResolvedModels

GPU_MEMORY_USABLE = 0.9
SMALLEST_PART = 0.05
"""Least share of a GPU; where a process would get less, the launch is refused."""
LONGEST_IPC_PATH = 100
"""Bytes.  Linux allows 107 in a socket's path, and members may append a few."""


class LaunchError(CommandError):
    """The fleet, or a member, cannot run; the message is one line."""


@dataclass(frozen=True)
class Hardware:
    """What the cluster offers."""

    cores: Sequence[int]
    """CPU cores this process may use; members are bound to them when the cluster is only this host."""
    gpus: float
    local: bool
    """True: the cluster is this host, and ours alone.  False: a joined cluster, whose nodes may come and go."""
    cpus: float = 0.0
    """CPUs of a joined cluster, on all its nodes."""


@dataclass(frozen=True)
class MemberPlan:
    """One actor to start."""

    member_id: str
    kind: MemberKind
    cores: list[int]
    """CPU cores to bind to; empty: not bound."""
    num_cpus: float
    num_gpus: float
    address: str
    """Its socket; empty: the member listens on tcp, at an address that it makes on its node."""
    env: dict[str, str] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)
    """Further Ray resources, by name."""

    def may_share(self, other: MemberPlan) -> bool:
        """Whether this is a verifier on whose GPU Ray may place `other`."""
        return self.kind == "verifier" and other.num_gpus > 0 and self.num_gpus + other.num_gpus <= 1


@dataclass(frozen=True)
class FleetPlan:
    """The whole fleet, and all that members added later are planned for."""

    settings: Settings
    """With numbers of members, and every hardware default, filled in."""
    models: ResolvedModels
    hardware: Hardware
    runtime_dir: Path
    verifier_gpus: float
    """GPUs that Ray reserves for one verifier; less than 1 where processes share GPUs."""
    notes: list[str]
    """Lines about these decisions, printed at the start."""
    members: list[MemberPlan] = field(default_factory=list)

    def further(self, kind: MemberKind, others: Sequence[MemberPlan]) -> MemberPlan:
        """Plans one more member beside `others`: with the first free name, on the cores that the fewest others use."""
        taken = {other.member_id for other in others}
        member_id = next(name for i in count() if (name := f"{kind}-{i}") not in taken)
        used = Counter(core for other in others for core in other.cores)
        free_first = sorted(self.hardware.cores, key=lambda core: (used[core], core))
        settings, local = self.settings, self.hardware.local
        own = settings.verifier if kind == "verifier" else settings.drafting
        cpus = _cores_wanted(settings, self.models, self.hardware, kind)
        cores = sorted(free_first[:cpus]) if local else []
        threads = len(cores) or cpus
        if kind == "verifier" and threads:
            threads = max(threads // settings.verifier.tensor_parallel, 1)
        return MemberPlan(
            member_id=member_id,
            kind=kind,
            cores=cores,
            num_cpus=0 if local else cpus,
            num_gpus=self.verifier_gpus if kind == "verifier" else settings.drafting.gpus or 0.0,
            address=self._address(member_id),
            env={"OMP_NUM_THREADS": str(threads)} if threads else {},
            resources=own.ray_resources,
        )

    def _address(self, member_id: str) -> str:
        if not self.hardware.local:
            return ""
        path = self.runtime_dir / f"{member_id}.sock"
        if len(str(path)) > LONGEST_IPC_PATH:
            raise LaunchError(f"{path}: too long for a socket (set TMPDIR to a shorter directory)")
        return f"ipc://{path}"


def plan(settings: Settings, models: ResolvedModels, hardware: Hardware, runtime_dir: Path) -> FleetPlan:
    """Decides everything that can be decided before the first actor starts.  Raises `LaunchError`."""
    verifiers, drafters = _counts(settings, models, hardware)
    notes: list[str] = []
    filled, verifier_gpus = _fill(settings, models, hardware, verifiers, drafters, notes)
    fleet = FleetPlan(filled, models, hardware, runtime_dir, verifier_gpus, notes)
    numbers: dict[MemberKind, int] = {"verifier": verifiers, "drafter": drafters}
    for kind, number in numbers.items():
        for _ in range(number):
            fleet.members.append(fleet.further(kind, fleet.members))
    bound = [f"{each.member_id} {','.join(map(str, each.cores))}" for each in fleet.members if each.cores]
    if bound:
        wanted = sum(number * _cores_wanted(filled, models, hardware, kind) for kind, number in numbers.items())
        there = len(hardware.cores)
        shared = f" (shared: {wanted} wanted, {there} available)" if wanted > there else ""
        notes.append(f"CPU cores: {'; '.join(bound)}{shared}")
    return fleet


def _counts(settings: Settings, models: ResolvedModels, hardware: Hardware) -> tuple[int, int]:
    """Numbers of verifiers and drafters; `auto`: as many as the GPUs, or else the CPU cores, hold, and a drafter per model."""
    if hardware.gpus:
        devices: float = hardware.gpus
        verifier, drafter = float(settings.verifier.tensor_parallel), _drafter_gpus(settings, models, hardware)
    else:
        devices = len(hardware.cores) if hardware.local else hardware.cpus
        verifier, drafter = (float(_cores_wanted(settings, models, hardware, kind)) for kind in ("verifier", "drafter"))
    verifiers = settings.verifiers
    drafters: int | Literal["auto"] = settings.drafters if settings.mode in REMOTE_MODES else 0
    least = max(1, len(models.in_turn))
    if isinstance(verifiers, str):
        drafting = _taken(least if isinstance(drafters, str) else drafters, drafter)
        verifiers = int(max(1, _held(devices - drafting, verifier)))
    if isinstance(drafters, str):
        drafters = int(max(least, _held(devices - verifiers * verifier, drafter) if drafter else 0))
    return verifiers, drafters


def _held(devices: float, each: float) -> int:
    """How many processes of `each` devices there is room for; Ray gives a process a part of one GPU, never of several.

    >>> _held(5, 2), _held(2, 0.4)
    (2, 4)
    """
    return int(devices / each) if each >= 1 else int(devices) * int(1 / each + 1e-9)


def _taken(count: int, each: float) -> float:
    """Devices in use by `count` processes of `each` devices.

    >>> _taken(2, 2), _taken(5, 0.4)
    (4, 3)
    """
    return math.ceil(count / _held(1, each)) if 0 < each < 1 else count * each


def _drafter_gpus(settings: Settings, models: ResolvedModels, hardware: Hardware) -> float:
    """GPUs of one drafter, while there are enough of them."""
    if settings.drafting.gpus is not None:
        return settings.drafting.gpus
    return 1.0 if hardware.gpus and models.has_weights else 0.0


def _cores_wanted(settings: Settings, models: ResolvedModels, hardware: Hardware, kind: MemberKind) -> int:
    """CPU cores that one member of this kind computes on; 0: it computes on a GPU, or next to nothing."""
    if kind == "verifier":
        return 0 if hardware.gpus else max(settings.verifier.cores, settings.verifier.tensor_parallel)
    return 0 if settings.drafting.gpus or not models.has_weights else settings.drafting.cores


def share_gpus(gpus: int, verifiers: int, drafters: int) -> tuple[float, float]:
    """The parts of a GPU for each verifier and each drafter that share GPUs; verifiers must be placed first.

    Ray gives a part on one GPU, and takes the fullest GPU with room.  So drafters share the GPUs that verifiers leave.  If
    verifiers leave none, at most n are to be on one GPU: each gets a little more than 1/(n + 1), so that no further one fits.
    The rest of every GPU is for drafters.

    >>> share_gpus(4, 2, 4), share_gpus(2, 2, 1), share_gpus(1, 2, 0)
    ((1.0, 0.5), (0.501, 0.499), (0.5, 0.0))
    """
    if verifiers < gpus:
        return 1.0, 1000 // math.ceil(drafters / (gpus - verifiers)) / 1000
    on_one = math.ceil(verifiers / gpus)
    if not drafters:
        return 1000 // on_one / 1000, 0.0
    part = 1000 // (on_one + 1) + 1
    return part / 1000, (1000 - on_one * part) // math.ceil(drafters / gpus) / 1000


def _fill(
    settings: Settings, models: ResolvedModels, hardware: Hardware, verifiers: int, drafters: int, notes: list[str]
) -> tuple[Settings, float]:
    """Settings with these numbers of members and `drafting.gpus`; and the GPUs of one verifier.

    Where GPUs are shared, the settings also limit vLLM's `gpu_memory_utilization`.
    """
    verifier: float = settings.verifier.tensor_parallel if hardware.gpus else 0
    drafter = _drafter_gpus(settings, models, hardware)
    need = verifier * verifiers + _taken(drafters, drafter)
    engine_args = dict(settings.verifier.engine_args)
    if need > hardware.gpus:
        if verifier > 1 or settings.drafting.gpus is not None or not hardware.gpus:
            raise LaunchError(f"the fleet needs {need:g} GPUs and the cluster has {hardware.gpus:g}")
        verifier, drafter = share_gpus(int(hardware.gpus), verifiers, drafters if drafter else 0)
        if min(verifier, drafter or 1) < SMALLEST_PART:
            raise LaunchError(f"{verifiers + drafters} processes are too many for {hardware.gpus:g} GPUs")
        notes.append(f"{hardware.gpus:g} GPU(s) shared: {verifier:g} of one per verifier, {drafter:g} per drafter")
        if verifier < 1:
            memory = engine_args.setdefault("gpu_memory_utilization", round(GPU_MEMORY_USABLE * verifier, 2))
            notes[-1] += f", gpu_memory_utilization {memory:g}"
    filled = {
        "verifiers": verifiers,
        "drafters": drafters,
        "verifier": settings.verifier.model_copy(update={"engine_args": engine_args}),
        "drafting": settings.drafting.model_copy(update={"gpus": drafter}),
    }
    return settings.model_copy(update=filled), verifier
