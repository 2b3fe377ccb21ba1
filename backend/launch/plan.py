"""Plans the members of a fleet: cores, GPUs, addresses and environment of each.

Pure; the launcher calls it at the start, and for each member that is added later.  With fewer GPUs than processes, each process
gets an equal part of a GPU, and vLLM takes no more than that part of its memory.
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
from backend.fleet.members import NODE_HOST, MemberKind
from backend.models.resolve import ResolvedModels

GPU_MEMORY_USABLE = 0.9
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
    env: dict[str, str] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)
    """Further Ray resources, by name."""
    local: bool = False
    """True: the member also listens on ipc, for processes of its own node."""


@dataclass(frozen=True)
class FleetPlan:
    """The whole fleet; `settings` have every hardware default filled in."""

    settings: Settings
    hardware: Hardware
    """The hardware the fleet was planned for; members added later are planned for it too."""
    members: list[MemberPlan]
    encrypted: bool
    """True: members listen on tcp and need keys."""
    notes: list[str]
    """Lines about these decisions, printed at the start."""


def plan(settings: Settings, models: ResolvedModels, hardware: Hardware, runtime_dir: Path) -> FleetPlan:
    """Decides everything that can be decided before the first actor starts.  Raises `LaunchError`."""
    settings = counted(settings, models, hardware)
    verifiers, drafters = _counts(settings)
    notes: list[str] = []
    filled = _fill_gpus(settings, hardware, notes)
    names: list[tuple[str, MemberKind]] = [(f"verifier-{i}", "verifier") for i in range(verifiers)]
    names += [(f"drafter-{i}", "drafter") for i in range(drafters)]
    counts = [_cores_wanted(filled, models, hardware, kind) if hardware.local else 0 for _, kind in names]
    shares = share_cores(hardware.cores, counts)
    if hardware.local:
        _note_cores(names, shares, counts, hardware, notes)
    around = _Surroundings(filled, models, hardware, runtime_dir)
    members = [_member(around, member_id, kind, cores) for (member_id, kind), cores in zip(names, shares, strict=True)]
    return FleetPlan(filled, hardware, members, not hardware.local, notes)


def counted(settings: Settings, models: ResolvedModels, hardware: Hardware) -> Settings:
    """Settings with `auto` replaced by numbers of verifiers and drafters: as many as the GPUs, or else the CPU cores, hold."""
    if "auto" not in (settings.verifiers, settings.drafters):
        return settings
    if hardware.gpus:
        devices: float = hardware.gpus
        verifier = float(settings.verifier.tensor_parallel)
        drafter = 1.0 if settings.drafting.gpus is None else settings.drafting.gpus
        drafter = 0.0 if models.drafter_kind == "ngram" else drafter
    else:
        devices = len(hardware.cores)
        verifier, drafter = (float(_cores_wanted(settings, models, hardware, kind)) for kind in ("verifier", "drafter"))
    verifiers = settings.verifiers
    drafters: int | Literal["auto"] = settings.drafters if settings.mode in REMOTE_MODES else 0
    if isinstance(verifiers, str):
        drafting = drafter if isinstance(drafters, str) else drafter * drafters
        verifiers = max(1, int((devices - drafting) / verifier))
    left = devices - int(verifiers) * verifier
    if isinstance(drafters, str):
        drafters = max(1, int(left / drafter)) if drafter else 1
    return settings.model_copy(update={"verifiers": verifiers, "drafters": drafters})


def _counts(settings: Settings) -> tuple[int, int]:
    """Numbers of verifiers and drafters, from settings without `auto`; modes without remote drafting have no drafters."""
    verifiers, drafters = settings.verifiers, settings.drafters
    assert isinstance(verifiers, int)
    assert isinstance(drafters, int)
    return verifiers, drafters if settings.mode in REMOTE_MODES else 0


def plan_further(
    decided: FleetPlan, models: ResolvedModels, runtime_dir: Path, kind: MemberKind, others: Sequence[MemberPlan]
) -> MemberPlan:
    """Plans one more member beside `others`: with the first free name, on the cores that the fewest others use."""
    taken = {other.member_id for other in others}
    member_id = next(name for i in count() if (name := f"{kind}-{i}") not in taken)
    hardware = decided.hardware
    wanted = _cores_wanted(decided.settings, models, hardware, kind) if hardware.local else 0
    used = Counter(core for other in others for core in other.cores)
    cores = sorted(sorted(hardware.cores, key=lambda core: (used[core], core))[:wanted])
    return _member(_Surroundings(decided.settings, models, hardware, runtime_dir), member_id, kind, cores)


@dataclass(frozen=True)
class _Surroundings:
    """What every member's plan depends on."""

    settings: Settings
    models: ResolvedModels
    hardware: Hardware
    runtime_dir: Path


def _verifier_gpus(settings: Settings, hardware: Hardware) -> int:
    """GPUs of one verifier: one per tensor-parallel rank, or 0 without GPUs."""
    return settings.verifier.tensor_parallel if hardware.gpus else 0


def _cores_wanted(settings: Settings, models: ResolvedModels, hardware: Hardware, kind: MemberKind) -> int:
    """CPU cores that one member of this kind computes on; 0: it computes on a GPU, or next to nothing."""
    if kind == "verifier":
        return 0 if hardware.gpus else max(settings.verifier.cores, settings.verifier.tensor_parallel)
    return 0 if settings.drafting.gpus or models.drafter_kind == "ngram" else settings.drafting.cores


def _member(around: _Surroundings, member_id: str, kind: MemberKind, cores: list[int]) -> MemberPlan:
    settings, hardware = around.settings, around.hardware
    gpus = _gpu_share(settings, hardware) if kind == "verifier" else settings.drafting.gpus or 0.0
    cpus = len(cores) or _cores_wanted(settings, around.models, hardware, kind)
    threads = max(cpus // settings.verifier.tensor_parallel, 1) if kind == "verifier" and cpus else cpus
    return MemberPlan(
        member_id=member_id,
        kind=kind,
        cores=cores,
        num_cpus=0 if hardware.local else cpus,
        num_gpus=gpus,
        address=_address(settings, hardware, around.runtime_dir, member_id),
        env={"OMP_NUM_THREADS": str(threads)} if threads else {},
        resources=(settings.verifier if kind == "verifier" else settings.drafting).ray_resources,
        local=not hardware.local,
    )


def share_cores(available: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """`counts[i]` cores for process i: different cores until all are in use, then from the first core again.

    >>> share_cores([0, 1, 2], [1, 1, 2])
    [[0], [1], [0, 2]]
    """
    result = []
    position = 0
    for wanted in counts:
        share = min(wanted, len(available))
        result.append(sorted(available[(position + i) % len(available)] for i in range(share)))
        position += share
    return result


def _gpu_share(settings: Settings, hardware: Hardware) -> float:
    """GPUs that Ray reserves for one verifier; less than 1 where processes share GPUs."""
    per_verifier = _verifier_gpus(settings, hardware)
    verifiers, drafters = _counts(settings)
    need = per_verifier * verifiers + (settings.drafting.gpus or 0) * drafters
    if per_verifier != 1 or need <= hardware.gpus:
        return per_verifier
    free = hardware.gpus - (settings.drafting.gpus or 0) * drafters
    return math.floor(100 * free / verifiers) / 100


def _fill_gpus(settings: Settings, hardware: Hardware, notes: list[str]) -> Settings:
    """Settings with `drafting.gpus` filled in and, where GPUs are shared, vLLM's `gpu_memory_utilization`."""
    verifiers, drafters = _counts(settings)
    verifier = _verifier_gpus(settings, hardware)
    drafter = (1 if hardware.gpus else 0) if settings.drafting.gpus is None else settings.drafting.gpus
    if settings.drafter == "ngram" and settings.drafting.gpus is None:
        drafter = 0
    need = verifier * verifiers + drafter * drafters
    engine_args = dict(settings.verifier.engine_args)
    if need > hardware.gpus:
        if verifier > 1 or settings.drafting.gpus is not None or not hardware.gpus:
            raise LaunchError(f"the fleet needs {need:g} GPUs and the cluster has {hardware.gpus:g}")
        share = math.floor(100 * hardware.gpus / (verifiers + (drafters if drafter else 0))) / 100
        if share < 0.05:
            raise LaunchError(f"{verifiers + drafters} processes are too many for {hardware.gpus:g} GPUs")
        drafter = share if drafter else 0
        memory = engine_args.setdefault("gpu_memory_utilization", round(GPU_MEMORY_USABLE * share, 2))
        notes.append(f"{hardware.gpus:g} GPU(s) shared: {share:g} of one per process, gpu_memory_utilization {memory:g}")
    return settings.model_copy(
        update={
            "verifier": settings.verifier.model_copy(update={"engine_args": engine_args}),
            "drafting": settings.drafting.model_copy(update={"gpus": float(drafter)}),
        }
    )


def _note_cores(
    names: Sequence[tuple[str, MemberKind]],
    shares: Sequence[Sequence[int]],
    counts: Sequence[int],
    hardware: Hardware,
    notes: list[str],
) -> None:
    bound = [f"{name} {','.join(map(str, cores))}" for (name, _), cores in zip(names, shares, strict=True) if cores]
    if not bound:
        return
    wanted = sum(counts)
    shared = f" (shared: {wanted} wanted, {len(hardware.cores)} available)" if wanted > len(hardware.cores) else ""
    notes.append(f"CPU cores: {'; '.join(bound)}{shared}")


def _address(settings: Settings, hardware: Hardware, runtime_dir: Path, member_id: str) -> str:
    if not hardware.local:
        host = settings.transport.host or NODE_HOST
        return f"tcp://{f'[{host}]' if ':' in host else host}:{settings.transport.ports or 0}"
    path = runtime_dir / f"{member_id}.sock"
    if len(str(path)) > LONGEST_IPC_PATH:
        raise LaunchError(f"{path}: too long for a socket (set TMPDIR to a shorter directory)")
    return f"ipc://{path}"
