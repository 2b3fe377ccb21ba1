"""Decides when a draining member has nothing left to do.  Pure; the operator asks it with every snapshot."""

from dataclasses import dataclass, field

from backend.fleet import FleetSnapshot


@dataclass
class Emptying:
    """Follows one member that takes no new work from fleet version `version` on.

    A gateway that has seen that version sends the member nothing more; whatever the gateway sent earlier has arrived by then.
    But the verifier's counters may be older: it takes them between two steps.  So a verifier counts as empty when, after all
    gateways have seen the version, its counters have changed twice and show no requests.  The second change was surely
    counted after the first had been seen.
    """

    _member_id: str
    _version: int
    _unassigned_at: float | None = None
    _counted: set[float] = field(default_factory=set)
    """The different states of the verifier's counters that were seen since all gateways have known."""

    def is_over(self, snapshot: FleetSnapshot, now: float) -> bool:
        """Whether the member may be ended without losing work; True for a lost one.

        False if the snapshot lacks it: a coordinator that was just started does not know its members yet.
        """
        view = snapshot.view(self._member_id)
        if view is None or view.member.state == "lost":
            return view is not None
        if view.member.kind == "drafter":
            return self._is_unassigned(snapshot, now)
        gateways = [each for each in snapshot.members if each.member.kind == "gateway" and each.member.state == "ready"]
        if view.verifier is None or any(gateway.seen_version < self._version for gateway in gateways):
            return False
        stats = view.verifier
        self._counted.add(stats.started_at + stats.busy_s + sum(stats.idle_s.values()))
        return len(self._counted) > 2 and not stats.running and not stats.waiting

    def requests(self, snapshot: FleetSnapshot) -> int:
        """Requests that the member still has, for progress messages."""
        view = snapshot.view(self._member_id)
        return view.verifier.running + view.verifier.waiting if view is not None and view.verifier is not None else 0

    def _is_unassigned(self, snapshot: FleetSnapshot, now: float) -> bool:
        """Whether no verifier uses the drafter, and each verifier has reported since then, and so received its new orders."""
        if any(each.drafter_id == self._member_id for each in snapshot.assignments):
            self._unassigned_at = None
            return False
        if self._unassigned_at is None:
            self._unassigned_at = now
        verifiers = [each for each in snapshot.members if each.member.kind == "verifier" and each.member.state == "ready"]
        return all(each.last_report_s < now - self._unassigned_at for each in verifiers)
