"""Administrators' commands against a fleet: what is taken, what is refused, and what nobody notices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backend.coordinator.administration import KEPT, Administration
from backend.coordinator.commands import (
    Add,
    Answer,
    AnyCommand,
    Assign,
    CommandRefused,
    Done,
    Drain,
    Remove,
    Restart,
    Resume,
    SwapDrafter,
)
from backend.coordinator.policy import Coordinator
from backend.fleet import Draining
from tests.support.properties import examples
from tests.unit.backend.coordinator.test_policy import fleet, member, pairs, report, view


def administration(verifiers: int = 2, drafters: int = 2, has_drafters: bool = True) -> tuple[Administration, Coordinator]:
    policy = fleet(verifiers, drafters)
    policy.register(member("g0", "gateway"), 0.0)
    return Administration(policy, 30.0, has_drafters), policy


def done(answer: Answer) -> Done:
    assert isinstance(answer, Done)
    return answer


def reason(answer: Answer) -> str:
    assert isinstance(answer, CommandRefused)
    return answer.reason


def test_a_drained_verifier_takes_no_new_work_and_its_drafters_go_elsewhere() -> None:
    admin, policy = administration()
    answer = done(admin.submit(Drain(member="v0"), 0.0))
    assert (answer.effects, answer.version) == (["v0 takes no new work"], policy.snapshot(0.0).version)
    assert view(policy, "v0", 0.0).member.state == "draining"
    assert pairs(policy, 0.0) == {("v1", "d0"), ("v1", "d1")}
    assert report(policy, "v0", 0.1).drain
    # Nothing is left to do the second time.
    assert admin.submit(Drain(member="v0"), 0.2) == Done(policy.snapshot(0.2).version, [])
    assert isinstance(admin.submit(Resume(member="v0"), 0.3), Done)
    assert view(policy, "v0", 0.3).member.state == "ready"
    assert not report(policy, "v0", 0.4).drain


@pytest.mark.parametrize(
    ("command", "moved"),
    [
        (Drain(member="v0"), [False, False]),
        (Drain(member="v0", migrate=True), [True, True]),
        (Drain(member="v0", deadline_s=1.0), [False, True]),
    ],
)
def test_requests_are_moved_at_once_or_after_the_deadline_or_never(command: Drain, moved: list[bool]) -> None:
    admin, policy = administration()
    admin.submit(command, 0.0)
    drains = [view(policy, "v0", now).drain for now in (0.5, 1.5)]
    assert [drain is not None and drain.migrate for drain in drains] == moved
    report(policy, "v1", 1.5, state="draining")
    assert view(policy, "v1", 1.5).drain == Draining(migrate=True, ordered=False), "it asks to be relieved"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (Drain(member="g0"), "unknown_member"),
        (Drain(member="v0", deadline_s=-1.0), "invalid"),
        (Drain(member="v0", if_version=1), "version_mismatch"),
        (Resume(member="nobody"), "unknown_member"),
        (Remove(member="v0", deadline_s=float("nan")), "invalid"),
        (Add(kind="verifier", count=0), "invalid"),
        (Add(kind="drafter", count=17), "invalid"),
        (Assign(drafter="v0", verifiers=["v1"]), "unknown_member"),
        (Assign(drafter="d0", verifiers=["d1"]), "unknown_member"),
        (Restart(members=["v0", "v9"]), "unknown_member"),
        (Restart(members=[]), "invalid"),
        (SwapDrafter(drafter="v0", path="/x"), "unknown_member"),
        (SwapDrafter(drafter="d0", path=""), "invalid"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(command: AnyCommand, reason: str) -> None:
    admin, policy = administration()
    before = policy.snapshot(0.0)
    answer = admin.submit(command, 0.0)
    assert isinstance(answer, CommandRefused)
    assert (answer.reason, answer.version) == (reason, before.version)
    assert answer.message
    assert policy.snapshot(0.0) == before
    assert admin.operations == []


@pytest.mark.parametrize("command", [Drain(member="v0"), Remove(member="v0"), Restart(members=["v0"]), Restart()])
def test_the_last_verifier_goes_only_by_force_and_drafters_come_only_where_they_are_used(
    command: Drain | Remove | Restart,
) -> None:
    admin, _ = administration(drafters=0, has_drafters=False)
    admin.submit(Drain(member="v1"), 0.0)
    assert reason(admin.submit(command, 0.0)) == "last_verifier"
    assert isinstance(admin.submit(replace(command, force=True), 0.0), Done)
    assert reason(admin.submit(Add(kind="drafter"), 0.0)) == "invalid"
    assert isinstance(admin.submit(Add(kind="verifier"), 0.0), Done)


commands = st.one_of(
    st.builds(Drain, member=st.sampled_from(["v0", "v1", "d0"]), migrate=st.booleans()),
    st.builds(Resume, member=st.sampled_from(["v0", "v1"])),
    st.builds(Remove, member=st.sampled_from(["v0", "d0"])),
    st.builds(Add, kind=st.sampled_from(["verifier", "drafter"]), count=st.integers(1, 3)),
    st.builds(Assign, drafter=st.just("d0"), verifiers=st.none() | st.lists(st.sampled_from(["v0", "v1"]), max_size=2)),
    st.builds(Restart, members=st.none() | st.just(["v0"])),
    st.builds(SwapDrafter, drafter=st.just("d0"), path=st.just("/head")),
)


@examples(40)
@given(st.lists(commands, max_size=4), commands)
def test_a_dry_run_says_what_would_happen_and_changes_nothing(history: list[AnyCommand], command: AnyCommand) -> None:
    admin, _ = administration()
    for each in history:
        admin.submit(each, 0.0)
    before, operations = admin.snapshot(0.0), admin.operations
    dry = admin.submit(replace(command, dry_run=True), 0.0)
    assert (admin.snapshot(0.0), admin.operations) == (before, operations)
    real = admin.submit(command, 0.0)
    if isinstance(dry, Done) and isinstance(real, Done):
        assert dry.effects == real.effects


@examples(40)
@given(st.lists(commands, min_size=1, max_size=5))
def test_of_two_who_decided_on_the_same_version_only_one_changes_the_fleet(history: list[AnyCommand]) -> None:
    admin, policy = administration()
    for command in history:
        version = policy.snapshot(0.0).version
        first = admin.submit(replace(command, if_version=version), 0.0)
        if isinstance(first, Done) and first.effects:
            assert first.version > version
            assert reason(admin.submit(Drain(member="d1", if_version=version), 0.0)) == "version_mismatch"


@pytest.mark.parametrize("command", [Drain(member="v1"), Remove(member="v1"), Restart(members=["v1"])])
def test_a_verifier_that_waits_for_its_removal_is_no_other_that_serves(command: AnyCommand) -> None:
    admin, _ = administration(verifiers=2)
    removal = done(admin.submit(Remove(member="v0"), 0.0)).operation
    assert reason(admin.submit(command, 0.0)) == "last_verifier"
    (operation,) = admin.operations
    assert operation.id == removal
    admin.progress(replace(operation, state="failed"))
    assert isinstance(admin.submit(command, 0.0), Done), "it was not removed"


def test_operations_are_worked_on_one_after_the_other_and_the_last_are_kept() -> None:
    admin, _ = administration()
    first = done(admin.submit(Remove(member="d0"), 0.0))
    # When asked again, it is the same operation; something else with the same member has to wait.
    assert admin.submit(Remove(member="d0"), 0.0) == Done(first.version, [], first.operation)
    assert reason(admin.submit(SwapDrafter(drafter="d0", path="/head"), 0.0)) == "conflict"
    admin.submit(Drain(member="d0"), 0.0)
    for dry_run in (True, False):
        assert reason(admin.submit(Resume(member="d0", dry_run=dry_run), 0.0)) == "conflict"
    admin.submit(Add(kind="drafter"), 0.0)
    work = admin.next_operation()
    assert work is not None
    assert (work.id, work.kind, work.deadline_s) == (first.operation, "remove", 30.0)
    admin.progress(replace(work, state="running", note="draining d0"))
    assert admin.next_operation() is not None
    admin.progress(replace(work, state="failed", note="no"))
    for _ in range(2 * KEPT):
        admin.submit(Add(kind="drafter"), 0.0)
        pending = admin.next_operation()
        assert pending is not None
        assert pending.kind == "add"
        admin.progress(replace(pending, state="done", members=["d2"]))
    assert len(admin.operations) == KEPT + 1, "one still waits"
    assert admin.operations[-2].members == ["d2"]
    admin.progress(replace(work, note="forgotten long since"))
    assert work.id not in [each.id for each in admin.operations]
    # One from before a restart of the coordinator is none of those since.
    after = Administration(Coordinator(first_version=1000), 30.0, True)
    added = done(after.submit(Add(kind="verifier"), 1.0))
    after.progress(replace(work, state="done"))
    assert [(each.id, each.state) for each in after.operations] == [(added.operation, "waiting")]


def test_pins_hold_until_they_are_given_back() -> None:
    admin, policy = administration()
    answer = done(admin.submit(Assign(drafter="d0", verifiers=["v1", "v0", "v1"]), 0.0))
    assert answer.effects == ["d0 serves v0 and v1, and stays there"]
    assert admin.snapshot(0.0).pins == {"d0": ["v0", "v1"]}
    assert {("v0", "d0"), ("v1", "d0")} <= pairs(policy, 0.1)
    assert admin.submit(Assign(drafter="d0", verifiers=["v0", "v1"]), 0.1) == Done(policy.snapshot(0.1).version, [])
    assert isinstance(admin.submit(Assign(drafter="d0"), 0.2), Done)
    assert admin.snapshot(0.2).pins == {}
