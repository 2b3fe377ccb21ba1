"""Decides when a draining member has nothing left to do.  Pure; the operator asks it with every snapshot."""

from __future__ import annotations

from backend.fleet import FleetSnapshot, MemberView, VerifierStats


class Emptying:
    """Follows one member that takes no new work from fleet version `version` on.

    A gateway that has seen that version sends the member nothing more; whatever the gateway sent earlier has arrived by then.
    But the verifier's counters may be older: it takes them between two steps.  So a verifier counts as empty when, after all
    gateways have seen the version, its counters have changed twice and show no requests.  The second change was surely
    counted after the first had been seen.
    """

    def __init__(self, member_id: str, version: int) -> None:
        self._member_id = member_id
        self._version = version
        self._told_at: float | None = None
        self._accounted = 0.0
        self._renewals = 0

    def is_over(self, snapshot: FleetSnapshot, now: float) -> bool:
        """Whether the member may be ended without losing work; True for a member that is already gone."""
        views = {view.member.id: view for view in snapshot.members}
        view = views.get(self._member_id)
        if view is None or view.member.state == "lost":
            return True
        if view.member.kind == "drafter":
            return self._is_unassigned(snapshot, now)
        gateways = [each for each in snapshot.members if each.member.kind == "gateway" and each.member.state == "ready"]
        if any(gateway.seen_version < self._version for gateway in gateways):
            return False
        return self._is_idle(view.verifier)

    def requests(self, snapshot: FleetSnapshot) -> int:
        """Requests that the member still has, for progress messages."""
        stats = next((each.verifier for each in snapshot.members if each.member.id == self._member_id), None)
        return stats.running + stats.waiting if stats is not None else 0

    def _is_idle(self, stats: VerifierStats | None) -> bool:
        if stats is None:
            return False
        accounted = stats.started_at + stats.busy_s + sum(stats.idle_s.values())
        if self._told_at is None:
            self._told_at, self._accounted = 0.0, accounted
        elif accounted != self._accounted:
            self._accounted = accounted
            self._renewals += 1
        return self._renewals >= 2 and not stats.running and not stats.waiting

    def _is_unassigned(self, snapshot: FleetSnapshot, now: float) -> bool:
        """Whether no verifier uses the drafter, and each verifier has reported since then, and so received its new orders."""
        if any(each.drafter_id == self._member_id for each in snapshot.assignments):
            self._told_at = None
            return False
        if self._told_at is None:
            self._told_at = now
        return all(_heard_within(view, now - self._told_at) for view in snapshot.members if view.member.kind == "verifier")


def _heard_within(view: MemberView, seconds: float) -> bool:
    return view.member.state != "ready" or view.last_report_s < seconds
