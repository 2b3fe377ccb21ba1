"""`outrider records DIR summary | join | export`: summarises records, or converts them to files for other programs."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from backend.config.sources import Parser
from backend.records import export, summary
from backend.records.reading import Records, RecordsError, Selection
from backend.records.schema import KINDS

DESCRIPTION = """Reads what verifiers wrote with --records-dir.
summary: lengths, speeds, idle time; join: every verification with its step and its request; export: the rows of each kind.
"""
Print = Callable[[str], None]


def main(arguments: Sequence[str], say: Print, note: Print) -> None:
    """Runs one command; `say` gets its result, `note` gets remarks.  Raises `RecordsError`, `ConfigError`."""
    given = _parser().parse_args(list(arguments))
    records = Records(given.directory, selection_of(given))
    try:
        _COMMANDS[given.command](records, given, say, note)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RecordsError(f"{error.filename or given.directory}: {error.strerror or error}") from error
    for file in records.unreadable:
        note(f"{file} cannot be read and was skipped")


def _summary(records: Records, given: argparse.Namespace, say: Print, note: Print) -> None:
    result = summary.summarise(records)
    if given.json:
        say(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        say("\n".join(summary.lines(result)))


def _join(records: Records, given: argparse.Namespace, say: Print, note: Print) -> None:
    kind = _format(given, given.output)
    if given.output is not None:
        count = export.write_file(export.joined(records), given.output, kind)
        note(f"{count} rows in {given.output}" if count else f"no verifications; {given.output} is not written")
        return
    if kind == "parquet":
        raise RecordsError("parquet needs a file: --output FILE")
    if not export.write(export.joined(records), sys.stdout.buffer, kind):
        note("no verifications")
    sys.stdout.buffer.flush()


def _export(records: Records, given: argparse.Namespace, say: Print, note: Print) -> None:
    if given.output is None:
        raise RecordsError("export needs --output DIRECTORY")
    kind = _format(given, None)
    for name in given.kind or KINDS:
        file = given.output / f"{name}.{kind}"
        count = export.write_file(export.rows(records, name), file, kind)
        note(f"{count} rows in {file}" if count else f"no rows of {name}")


_COMMANDS = {"summary": _summary, "join": _join, "export": _export}


def _format(given: argparse.Namespace, output: Path | None) -> export.Format:
    if given.format is not None:
        return given.format  # type: ignore[no-any-return]
    if output is not None:
        for known in export.FORMATS:
            if output.suffix == f".{known}":
                return known
        raise RecordsError(f"{output}: --format is needed, or a name that ends in .csv, .jsonl or .parquet")
    return "csv"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="outrider records", description=DESCRIPTION, allow_abbrev=False)
    say = parser.add_argument
    say("directory", type=Path, metavar="DIR", help="a directory of records, of one verifier or of several")
    say("command", choices=sorted(_COMMANDS), metavar="COMMAND", help="summary, join or export")
    add_selection(parser)
    say("--json", action="store_true", help="summary: as JSON")
    say("--output", type=Path, metavar="PATH", help="join: a file (default: standard output); export: a directory")
    say("--format", choices=export.FORMATS, help="default: by the name of the file, else csv")
    say("--kind", action="append", choices=sorted(KINDS), help="export: only this kind (may be given several times)")
    return parser


def add_selection(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("--verifier", action="append", default=[], metavar="ID", help="only this verifier (may be given several times)")
    say("--since", type=_moment, metavar="TIME", help="only from then on: 2026-01-31T12:00:00 (UTC) or Unix seconds")
    say("--until", type=_moment, metavar="TIME", help="only before then")


def selection_of(given: argparse.Namespace) -> Selection:
    """The selection that the options of `add_selection` make.  Raises `RecordsError` for an empty period."""
    if given.since is not None and given.until is not None and given.since >= given.until:
        raise RecordsError("--since must be before --until")
    return Selection(frozenset(given.verifier), given.since, given.until)


def _moment(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 2026-01-31T12:00:00 or Unix seconds") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
