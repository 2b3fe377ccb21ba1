"""`outrider records DIR summary | report | join | export`: figures and plots of records, and files for other programs."""

import argparse
import datetime
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from backend.config.sources import CommandError, Parser, Say
from backend.records import export
from backend.records.markdown import FORCED, sections
from backend.records.plots import draw
from backend.records.reading import Records
from backend.records.schema import KINDS
from backend.records.summary import Summary, summarise

DESCRIPTION = """Reads what verifiers wrote with --records-dir, or a rollout in the directory of a round.
summary: lengths, speeds, acceptance, idle time; report: the summary with plots, as Markdown and PNG files;
join: every verification with its step and its request; export: the rows of each kind.
"""
SUFFIXES: dict[str, export.Format] = {".csv": "csv", ".parquet": "parquet"}


def main(arguments: Sequence[str], say: Say, note: Say) -> None:
    """Runs one command; `say` gets its result, `note` gets remarks.  Raises `CommandError`, `ConfigError`."""
    given = _parser().parse_args(list(arguments))
    if given.since >= given.until:
        raise CommandError("--since must be before --until")
    records = Records(given.directory, given.verifier, given.since, given.until)
    try:
        _COMMANDS[given.command](records, given, say, note)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{error.filename or given.directory}: {error.strerror or error}") from error


def _summary(records: Records, given: argparse.Namespace, say: Say, note: Say) -> None:
    result = summarise(records.workers())
    if given.json:
        say(msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(result) | _missing(records))).decode())
    else:
        say("\n".join(_markdown(records, result)))


def _report(records: Records, given: argparse.Namespace, say: Say, note: Say) -> None:
    workers = records.workers()
    summary = summarise(workers)
    output: Path = given.output or given.directory / "report"
    pictures = draw(workers, summary, output)
    (output / "report.md").write_text("\n".join([*_markdown(records, summary), *pictures, ""]), encoding="utf-8")
    note(f"{output / 'report.md'}, with its plots as PNG files beside it")


def _markdown(records: Records, summary: Summary) -> list[str]:
    wall_s = summary.straggler.finished_s
    began = datetime.datetime.fromtimestamp(summary.began_at, datetime.UTC)
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(summary.finish_reasons.items()))
    lines = [
        f"# Records from {began:%Y-%m-%d %H:%M:%SZ} on",
        "",
        f"{summary.requests} requests ended ({reasons or 'none'}); {summary.tokens} tokens in {wall_s:.1f} s.",
        f"The last worker, {summary.straggler.worker}, ended {summary.straggler.behind_the_others_s:.1f} s behind the others.",
    ]
    if summary.teacher_forced.drafts and not summary.live.drafts:
        lines.append(FORCED)
    missing = _missing(records)
    if missing["dropped"]:
        lines.append(f"**{missing['dropped']} rows were dropped while serving: sums are too small by them.**")
    if missing["removed"]:
        lines.append(f"**{missing['removed']} rows are missing: the oldest files were deleted to make room.**")
    return lines + sections(summary)


def _missing(records: Records) -> dict[str, int]:
    """Number of rows that are not in the files, by cause."""
    books = [each.books for each in records.incarnations]
    return {name: sum(sum(getattr(each, name).values()) for each in books) for name in ("dropped", "removed")}


def _join(records: Records, given: argparse.Namespace, say: Say, note: Say) -> None:
    kind = _format(given, given.output)
    if given.output is None and kind == "parquet":
        raise CommandError("parquet needs a file: --output FILE")
    table = export.join_verifications(records)
    export.write(table, given.output or sys.stdout.buffer, kind)
    note(f"{table.num_rows} rows" + (f" in {given.output}" if given.output else ""))


def _export(records: Records, given: argparse.Namespace, say: Say, note: Say) -> None:
    if given.output is None:
        raise CommandError("export needs --output DIRECTORY")
    kind = _format(given, None)
    for name in given.kind or KINDS:
        table, file = export.rows(records, name), given.output / f"{name}.{kind}"
        export.write(table, file, kind)
        note(f"{table.num_rows} rows in {file}")


_COMMANDS = {"summary": _summary, "report": _report, "join": _join, "export": _export}


def _format(given: argparse.Namespace, output: Path | None) -> export.Format:
    if given.format is not None or output is None:
        return given.format or "csv"
    if output.suffix not in SUFFIXES:
        raise CommandError(f"{output}: --format is needed, or a name that ends in {' or '.join(SUFFIXES)}")
    return SUFFIXES[output.suffix]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="outrider records", description=DESCRIPTION, allow_abbrev=False)
    say = parser.add_argument
    say("directory", type=Path, metavar="DIR", help="records of one verifier or of several, or a round of a rollout")
    say("command", choices=sorted(_COMMANDS), metavar="COMMAND", help=", ".join(_COMMANDS))
    say("--verifier", action="append", default=[], metavar="ID", help="only this verifier (may be given several times)")
    say(
        "--since",
        type=_moment,
        default=-math.inf,
        metavar="TIME",
        help="only from then on: 2026-01-31T12:00:00 (UTC) or Unix seconds",
    )
    say("--until", type=_moment, default=math.inf, metavar="TIME", help="only before then")
    say("--json", action="store_true", help="summary: as JSON")
    say("--output", type=Path, metavar="PATH", help="join: a file (default: standard output); export, report: a directory")
    say("--format", choices=sorted(SUFFIXES.values()), help="default: by the name of the file, else csv")
    say("--kind", action="append", choices=sorted(KINDS), help="export: only this kind (may be given several times)")
    return parser


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
