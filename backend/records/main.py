"""`outrider records DIR`: figures of records, as Markdown or JSON.  The files are Parquet, which other programs read."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from backend.config.sources import Parser
from backend.records.markdown import FORCED, sections
from backend.records.reading import EVERYTHING, Records, RecordsError, Selection
from backend.records.summary import Summary, summarise

DESCRIPTION = """Sums up what verifiers wrote with --records-dir, or a rollout in the directory of a round: lengths, speeds,
acceptance, idle time."""
Print = Callable[[str], None]


def main(arguments: Sequence[str], say: Print) -> None:
    """`say` gets the summary.  Raises `RecordsError`, `ConfigError`."""
    given = _parser().parse_args(list(arguments))
    if given.since >= given.until:
        raise RecordsError("--since must be before --until")
    records = Records(given.directory, Selection(frozenset(given.verifier), given.since, given.until))
    try:
        result = summarise(records.workers())
    except OSError as error:
        raise RecordsError(f"{error.filename or given.directory}: {error.strerror or error}") from error
    if given.json:
        lost = {"dropped": _dropped(records), "removed": _removed(records)}
        say(msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(result) | lost)).decode())
    else:
        say("\n".join(_markdown(records, result)))


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
    if dropped := _dropped(records):
        lines.append(f"**{dropped} rows were dropped while serving: sums are too small by them.**")
    if removed := _removed(records):
        lines.append(f"**{removed} rows are missing: the oldest files were deleted to make room.**")
    return lines + sections(summary)


def _dropped(records: Records) -> int:
    return sum(sum(each.books.dropped.values()) for each in records.incarnations)


def _removed(records: Records) -> int:
    return sum(sum(each.books.removed.values()) for each in records.incarnations)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="outrider records", description=DESCRIPTION, allow_abbrev=False)
    say = parser.add_argument
    say("directory", type=Path, metavar="DIR", help="records of one verifier or of several, or a round of a rollout")
    say("--verifier", action="append", default=[], metavar="ID", help="only this verifier (may be given several times)")
    say(
        "--since",
        type=_moment,
        default=EVERYTHING.since,
        metavar="TIME",
        help="only from then on: 2026-01-31T12:00:00 (UTC) or Unix seconds",
    )
    say("--until", type=_moment, default=EVERYTHING.until, metavar="TIME", help="only before then")
    say("--json", action="store_true", help="as JSON")
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
