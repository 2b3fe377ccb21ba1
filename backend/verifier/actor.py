"""The verifier as a Ray actor."""

from typing import ClassVar

from backend.config import Settings
from backend.fleet import Member, MemberKind, Orders
from backend.member.actor import MemberActor, MemberProcess
from backend.models.resolve import ResolvedModels
from backend.transport import ServerKeys


class VerifierActor(MemberActor):
    """A verifier replica."""

    kind: ClassVar[MemberKind] = "verifier"

    def _build(
        self,
        member: Member,
        settings: Settings,
        paths: ResolvedModels,
        fleet_keys: ServerKeys | None,
        server_keys: ServerKeys | None,
    ) -> MemberProcess:
        # vLLM's import is slow; meanwhile the fleet hears that this member is starting.
        from backend.verifier.process import VerifierProcess

        return VerifierProcess(
            member.id,
            member.incarnation,
            settings,
            paths,
            member.address,
            fleet_keys,
            server_keys,
            local_address=member.local_address,
        )

    def _is_idle(self) -> bool:
        stats = self._process.stats()
        return not stats.running + stats.waiting

    def _obey(self, orders: Orders) -> None:
        if self._process is not None:
            self._process.set_drafters(orders.drafters)
        super()._obey(orders)
