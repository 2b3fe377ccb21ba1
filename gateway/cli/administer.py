"""`outrider drain | resume | remove | add | assign | restart | swap-drafter`: the administrator's side of the command line.

Turns arguments into a command, sends it to the coordinator, and follows the resulting operation until it has ended.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from backend.config.sources import CommandError, ConfigError, Parser, Say, load
from backend.coordinator.commands import COMMANDS, AnyCommand, CommandRefused
from gateway.cli.signals import signals

if TYPE_CHECKING:
    from backend.coordinator.actor import CoordinatorHandle

POLL_S = 0.3

SUMMARIES = {
    "drain": "a verifier or drafter takes no new work",
    "resume": "end a drain",
    "remove": "drain a member, then end its process",
    "add": "start further verifiers or drafters",
    "assign": "bind a drafter to verifiers by hand, or give it back (--auto)",
    "restart": "drain members, end them and start them again, one after the other",
    "swap-drafter": "have a drafter load another head",
}

FLEET_SETTINGS = ("config", "ray_address", "ray_namespace")
"""The settings that choose the fleet."""


def main(name: str, arguments: Sequence[str]) -> None:
    """Carries out one command on a running fleet.  Raises `ConfigError` or `CommandError`."""
    command, given, rest = parse(name, arguments)
    loaded = load(rest, f"outrider {name}")
    from backend.coordinator import CoordinatorUnavailable
    from backend.launch.finding import found_fleet

    with signals(), found_fleet(loaded, given.fleet) as (coordinator, _):
        try:
            run(coordinator, command, not getattr(given, "no_wait", True), print)
        except CoordinatorUnavailable as error:
            raise CommandError(f"{error}; `outrider status` shows what became of it") from error


def parse(name: str, arguments: Sequence[str]) -> tuple[AnyCommand, argparse.Namespace, list[str]]:
    """The command, the parsed options, and the arguments that are settings.  Raises `ConfigError`."""
    given = _parser(name).parse_args(list(arguments))
    chosen = {f"--{setting.replace('_', '-')}": getattr(given, setting) for setting in FLEET_SETTINGS}
    rest = [part for flag, value in chosen.items() if value is not None for part in (flag, value)]
    return _command(name, given), given, rest


def run(coordinator: CoordinatorHandle, command: AnyCommand, wait: bool, say: Say, poll_s: float = POLL_S) -> None:
    """Has `command` carried out.  Raises `CommandError`, or `CoordinatorUnavailable` (the fleet then goes on)."""
    answer = coordinator.submit(command)
    if isinstance(answer, CommandRefused):
        raise CommandError(f"{answer.message} (fleet version {answer.version})")
    would = "would happen: " if command.dry_run else ""
    for effect in answer.effects or ["nothing to do"]:
        say(would + effect)
    say(f"fleet version {answer.version}")
    if answer.operation is None:
        return
    if not wait:
        say(f"operation {answer.operation}; `outrider status` shows how it goes")
        return
    _follow(coordinator, answer.operation, say, poll_s)


def _follow(coordinator: CoordinatorHandle, operation_id: int, say: Say, poll_s: float) -> None:
    """Reports the progress of an operation until it has ended."""
    reported = ""
    while True:
        operation = next((each for each in coordinator.snapshot().operations if each.id == operation_id), None)
        if operation is None:
            raise CommandError(f"the coordinator was restarted and does not know operation {operation_id} any more")
        if operation.note != reported and operation.state in ("waiting", "running"):
            reported = operation.note
            say(reported)
        if operation.state == "failed":
            raise CommandError(operation.note)
        if operation.state == "done":
            say(operation.note)
            return
        time.sleep(poll_s)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"outrider {name}", description=f"Administration: {SUMMARIES[name]}.", allow_abbrev=False)
    if name in ("drain", "resume", "remove"):
        parser.add_argument("member", help="a verifier or drafter, as `outrider status` names it")
    elif name == "add":
        parser.add_argument("kind", choices=("verifier", "drafter"))
        parser.add_argument("--count", type=int, default=1, help="how many")
    elif name == "assign":
        parser.add_argument("drafter")
        parser.add_argument("verifiers", nargs="*", metavar="verifier", help="those that it serves, and nobody else")
        parser.add_argument("--auto", action="store_true", help="give it back to the coordinator's policy")
    elif name == "restart":
        parser.add_argument("members", nargs="*", metavar="member")
        parser.add_argument("--rolling", action="store_true", help="every verifier and drafter")
        about = "let requests finish for --deadline-s before they are moved"
        parser.add_argument("--finish", dest="migrate", action="store_false", help=about)
    else:
        parser.add_argument("drafter")
        parser.add_argument("path", help="directory of the head, on the drafter's machine")
    if name in ("drain", "remove"):
        parser.add_argument("--migrate", action="store_true", help="move a verifier's requests to others at once")
    if name in ("drain", "remove", "restart"):
        parser.add_argument("--deadline-s", type=float, help="move the requests that are left after so many seconds")
        parser.add_argument("--force", action="store_true", help="although no other verifier takes requests")
    if name in ("remove", "add", "restart", "swap-drafter"):
        parser.add_argument("--no-wait", action="store_true", help="return before it is done")
    parser.add_argument("--if-version", type=int, help="only if the fleet is still at this version (see `outrider status`)")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen")
    parser.add_argument("--fleet", help="namespace or pid of the fleet, where several run on this host")
    for setting in FLEET_SETTINGS:
        parser.add_argument(f"--{setting.replace('_', '-')}", help="as for `outrider status`")
    return parser


def _command(name: str, given: argparse.Namespace) -> AnyCommand:
    if name == "assign" and given.auto == bool(given.verifiers):
        raise ConfigError("assign: name the verifiers, or give --auto")
    if name == "restart" and given.rolling == bool(given.members):
        raise ConfigError("restart: name members, or give --rolling for all of them")
    command = COMMANDS[name]
    fields = {each: getattr(given, each) for each in command.__struct_fields__}
    if "path" in fields:
        # The drafter runs in another directory.
        fields["path"] = os.path.abspath(given.path)
    # argparse gives an empty list where none are named; then the command's default holds.
    return command(**{each: value for each, value in fields.items() if value != []})
