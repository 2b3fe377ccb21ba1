"""Loans between the coordinator and the launcher: who is out of service when, and what a restart of either leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.config.settings import ElasticSettings
from backend.coordinator.administration import Administration
from backend.coordinator.commands import Assign, Done, Refused, Remove, Restart
from backend.coordinator.policy import Coordinator
from backend.coordinator.roles import Roles
from backend.fleet import Loan, VerifierStats
from tests.unit.test_coordinator_policy import fleet, member

LENT = "drafter-at-v1"
ON = ElasticSettings(enabled=True)


@dataclass
class Bench:
    """Two verifiers of which one has work, no drafter; the launcher is played by the test."""

    settings: ElasticSettings = ON
    now: float = 0.0
    policy: Coordinator = field(default_factory=lambda: fleet(2, 0))
    told: list[Loan] = field(default_factory=list)
    load: dict[str, int] = field(default_factory=lambda: {"v0": 1, "v1": 0})

    def __post_init__(self) -> None:
        self.administration = Administration(self.policy, 30.0, True)
        self.roles = Roles(self.policy, self.settings, self.administration.busy_with)
        self.administration.lent_drafters = lambda: self.roles.drafters

    def ask(self, seconds: float = 0.25) -> list[str]:
        """Reports, then the launcher's question."""
        self.now += seconds
        for verifier, running in self.load.items():
            stats = VerifierStats(verifier, 0.0, "auto", 4, busy_s=self.now, running=running, plain_step_s=0.01)
            self.policy.report(verifier, "i0", "ready", self.now, verifier=stats)
        if any(each.drafter_id and each.phase == "lent" for each in self.told):
            self.policy.report(LENT, "i0", "ready", self.now)
        return self.roles.lending(self.told, self.now)

    def lend(self) -> None:
        while not self.ask():
            assert self.now < 10
        self.policy.register(member(LENT, "drafter"), self.now)
        self.told = [Loan("v1", LENT, "lent", "sleep")]
        assert self.ask() == ["v1"]

    def states(self) -> dict[str, str]:
        return {view.member.id: view.member.state for view in self.policy.snapshot(self.now).members}

    def drafting(self) -> set[tuple[str, str]]:
        return {(each.verifier_id, each.drafter_id) for each in self.policy.snapshot(self.now).assignments}


def test_a_lent_verifier_takes_nothing_new_and_the_drafter_in_its_place_serves_the_other() -> None:
    bench = Bench()
    bench.lend()
    assert bench.states() == {"v0": "ready", "v1": "lent", LENT: "ready"}
    assert bench.drafting() == {("v0", LENT)}
    assert bench.policy.counters.lends == 1
    (loan,) = bench.roles.shown(bench.policy.snapshot(bench.now), bench.now).loans
    assert (loan.verifier_id, loan.drafter_id, loan.phase, loan.method) == ("v1", LENT, "lent", "sleep")
    assert "idle for" in loan.note
    # It is not told to drain: it is not about to end.
    assert not bench.policy.report("v1", "i0", "ready", bench.now).drain


def test_on_return_the_drafter_goes_first_and_the_verifier_serves_when_it_is_back() -> None:
    bench = Bench()
    bench.lend()
    bench.load["v0"] = 30
    bench.policy.drain("v0", bench.now)
    assert bench.ask() == []
    assert bench.drafting() == set()
    assert bench.states() == {"v0": "draining", "v1": "lent", LENT: "draining"}
    bench.told = [Loan("v1", LENT, "returning", "sleep")]
    bench.ask()
    assert bench.states()["v1"] == "lent"
    bench.policy.deregister(LENT, "i0", bench.now)
    bench.told = []
    bench.ask()
    assert bench.states() == {"v0": "draining", "v1": "ready"}
    assert (bench.policy.counters.returns, bench.policy.counters.lends_failed) == (1, 0)
    assert not bench.roles.loans


def test_a_verifier_that_only_idles_serves_from_the_decision_on() -> None:
    bench = Bench()
    bench.lend()
    bench.told = [Loan("v1", LENT, "lent", "aside")]
    bench.ask()
    bench.policy.drain("v0", bench.now)
    assert bench.ask() == []
    assert bench.states() == {"v0": "draining", "v1": "ready", LENT: "draining"}


def test_a_coordinator_that_was_restarted_takes_over_what_it_is_told() -> None:
    bench = Bench()
    bench.told = [Loan("v1", LENT, "lent", "swap")]
    bench.policy.register(member(LENT, "drafter"), 0.0)
    bench.ask()
    assert bench.ask() == ["v1"]
    assert bench.states()["v1"] == "lent"
    assert bench.drafting() == {("v0", LENT)}
    other = Bench()
    other.told = [Loan("v1", LENT, "returning", "swap")]
    assert other.ask() == []
    assert other.states()["v1"] == "lent"


def test_a_failed_loan_is_counted_and_its_place_rests() -> None:
    bench = Bench()
    while not bench.ask():
        pass
    bench.told = [Loan("v1", "", "failed", note="no room")]
    assert bench.ask() == []
    bench.told = []
    bench.ask()
    assert bench.states()["v1"] == "ready"
    assert bench.policy.counters.lends_failed == 1
    ended = bench.now
    while not bench.ask():
        pass
    assert bench.now - ended >= 2 * ON.rest_s


def test_a_loan_that_the_launcher_never_began_ends_with_the_next_question() -> None:
    bench = Bench()
    while not bench.ask():
        pass
    bench.load["v1"] = 1
    assert bench.ask() == []
    bench.ask()
    assert bench.states()["v1"] == "ready"


def test_an_operation_takes_the_place_of_its_member_back_and_a_lent_drafter_is_nobodys_to_command() -> None:
    bench = Bench()
    bench.lend()
    for command in (Remove(member=LENT), Restart(members=[LENT])):
        refused = bench.administration.submit(command, bench.now)
        assert isinstance(refused, Refused)
        assert refused.reason == "conflict"
    assert isinstance(bench.administration.submit(Assign(drafter=LENT, verifiers=["v0"]), bench.now), Done)
    taken = bench.administration.submit(Restart(members=None), bench.now)
    assert isinstance(taken, Done)
    assert bench.administration.operations[-1].members == ["v0", "v1"]
    assert bench.ask() == []


def test_switched_off_nothing_is_lent() -> None:
    bench = Bench(settings=ElasticSettings())
    assert not any(bench.ask() for _ in range(100))
