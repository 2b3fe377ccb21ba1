"""The verifier as a Ray actor."""

from typing import ClassVar

from backend.config import Settings
from backend.coordinator import FleetInfo
from backend.fleet import Member, MemberKind, Orders
from backend.member.actor import MemberActor, MemberProcess
from backend.transport import ServerKeys


class VerifierActor(MemberActor):
    """A verifier replica."""

    kind: ClassVar[MemberKind] = "verifier"

    def _build(self, member: Member, settings: Settings, info: FleetInfo, keys: ServerKeys | None) -> MemberProcess:
        # vLLM's import is slow; meanwhile the fleet hears that this member is starting.
        from backend.verifier.process import VerifierProcess

        own = member.address, info.fleet_keys, keys, member.local_address
        return VerifierProcess(member.id, member.incarnation, settings, info.models, *own)

    def _is_idle(self) -> bool:
        stats = self._process.stats()
        return not stats.running + stats.waiting

    def _obey(self, orders: Orders) -> None:
        if self._process is not None:
            self._process.set_drafters(orders.drafters)
        super()._obey(orders)
