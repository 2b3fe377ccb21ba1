"""The administrator's commands as arguments, and how an operation is followed."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from backend.config.sources import CommandError
from backend.coordinator.commands import (
    Add,
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
from backend.fleet import Operation
from gateway.cli.administer import parse, run


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("drain v0 --migrate --dry-run", Drain(member="v0", migrate=True, dry_run=True)),
        ("drain v0 --deadline-s 2.5 --force --if-version 7", Drain(member="v0", deadline_s=2.5, force=True, if_version=7)),
        ("resume v0", Resume(member="v0")),
        ("remove d0", Remove(member="d0")),
        ("add drafter --count 2", Add(kind="drafter", count=2)),
        ("assign d0 v0 v1", Assign(drafter="d0", verifiers=["v0", "v1"])),
        ("assign d0 --auto", Assign(drafter="d0")),
        ("restart --rolling", Restart()),
        ("restart v0 d0 --finish --deadline-s 9", Restart(members=["v0", "d0"], migrate=False, deadline_s=9)),
        ("swap-drafter d0 /head", SwapDrafter(drafter="d0", path="/head")),
        ("swap-drafter d0 ./head", SwapDrafter(drafter="d0", path=str(Path.cwd() / "head"))),
    ],
)
def test_arguments_become_commands(line: str, command: AnyCommand) -> None:
    found, _, others = parse(line.split()[0], [*line.split()[1:], "--ray-address", "host:1"])
    assert (found, others) == (command, ["--ray-address", "host:1"])


def output_of(answer: Done | CommandRefused, *states: tuple[str, str], wait: bool = True, dry_run: bool = False) -> list[str]:
    """What is said of a command that gets this answer; its operation goes through `states`, one per look."""
    seen = [[Operation(4, "add", ["v1"], *state)] for state in states]  # type: ignore[arg-type]
    coordinator, lines = Mock(), list[str]()
    coordinator.submit.return_value = answer
    coordinator.snapshot.side_effect = lambda: SimpleNamespace(operations=seen.pop(0) if seen else [])
    run(coordinator, Add(kind="verifier", dry_run=dry_run), wait, lines.append, poll_s=0)
    return lines


def test_an_operation_is_followed_to_its_end() -> None:
    states = [("waiting", ""), ("running", "starting v1"), ("running", "starting v1"), ("done", "v1 started")]
    lines = output_of(Done(7, ["1 verifier started"], 4), *states)
    assert lines == ["1 verifier started", "fleet version 7", "starting v1", "v1 started"]
    lines = output_of(Done(7, ["1 verifier started"], 4), wait=False)
    assert lines[-1].startswith("operation 4;")
    assert output_of(Done(7, ["1 verifier started"]), dry_run=True)[0] == "would happen: 1 verifier started"
    assert output_of(Done(7, []))[0] == "nothing to do"


@pytest.mark.parametrize(
    ("answer", "states", "message"),
    [
        (Done(7, ["x"], 4), [("failed", "no room")], "no room"),
        (Done(7, ["x"], 4), [], "does not know operation 4"),
        (CommandRefused("version_mismatch", "the fleet is at version 9, not 3", 9), [], r"not 3 \(fleet version 9\)"),
    ],
)
def test_what_went_wrong_is_said(answer: Done | CommandRefused, states: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        output_of(answer, *states)
