"""The drafter as a Ray actor.

Three threads: Ray's (constructor, `swap_head`, `stop`), the drafting thread (`process.py`), and the membership's.  If the
drafting thread dies, the process exits so that Ray restarts it: a drafter that reports but does not draft is of no use.
"""

import logging
import os
from typing import ClassVar

from backend.config import Settings
from backend.coordinator import FleetInfo
from backend.fleet import Member, MemberKind
from backend.member.actor import MemberActor, MemberProcess
from backend.models.head_config import CheckpointError
from backend.models.kinds import KINDS
from backend.models.resolve import ResolvedModels
from backend.tracing import open_tracing
from backend.transport import ServerKeys, Wire

CRASHED = 70
"""Exit status after the drafting thread's death."""


class DrafterActor(MemberActor):
    """A drafter.  It may end at any time: verifiers drop it within a report or two, and need nothing from it."""

    kind: ClassVar[MemberKind] = "drafter"

    def swap_head(self, head_dir: str) -> str | None:
        """Drafts with another head or draft model from now on.  Returns why not, if it does not fit.

        Verifiers learn of the new head from the coordinator.
        """
        try:
            self._process.swap_head(head_dir)
        except (CheckpointError, TimeoutError) as error:
            return str(error)
        self._membership.take_head(head_dir, self._process.takes_features)
        return None

    def _build(self, member: Member, settings: Settings, info: FleetInfo, keys: ServerKeys | None) -> MemberProcess:
        # torch's import is slow; the fleet now knows that this member is starting, and the launcher need not wait for it.
        import torch

        from backend.drafter.process import DrafterModel, DrafterProcess

        paths = info.models
        if member.cores:
            torch.set_num_threads(len(member.cores))
        fleet_head = paths.drafter_dir if KINDS[paths.drafter_kind].takes_features else None
        own = paths.drafter(member.id)
        return DrafterProcess(
            member.id,
            DrafterModel(paths.target_dir, own.directory, fleet_head, paths.learning_dir, kind=own.kind),
            settings.drafting,
            member.address,
            Wire(info.fleet_keys),
            keys,
            on_crash=_exit,
            tracing=open_tracing(settings.tracing, "drafter", member.id),
            local_address=member.local_address,
        )

    def _model(self, settings: Settings, paths: ResolvedModels, member_id: str) -> str:
        return paths.drafter(member_id).name or settings.drafter

    def _head(self, paths: ResolvedModels, member_id: str) -> tuple[str, bool]:
        own = paths.drafter(member_id)
        is_fleets = (own.directory, own.kind) == (paths.drafter_dir, paths.drafter_kind)
        return "" if is_fleets else own.directory or own.kind, own.takes_features


def _exit() -> None:
    logging.shutdown()
    os._exit(CRASHED)
