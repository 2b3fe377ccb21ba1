"""`outrider report DIR`: draws a recorded period or a rollout as one HTML page.  The command-line process."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from backend.config.sources import Parser
from backend.records.chapters import Chapter, recorded, rolled_out, rounds
from backend.records.main import add_selection, selection_of
from backend.records.page import Picture, page
from backend.records.reading import Records, RecordsError, has_records

Say = Callable[[str], None]
DPI = 130


def main(arguments: Sequence[str], say: Say) -> None:
    """Reads the data, draws the plots, writes the page; `say` gets messages.  Raises `RecordsError`, `ConfigError`."""
    given = _parser().parse_args(list(arguments))
    directory: Path = given.directory
    _check_matplotlib()
    chapters = _chapters(given, say)
    output: Path = given.output or directory / "report"
    try:
        output.mkdir(parents=True, exist_ok=True)
        drawn = [(chapter, _draw(chapter, output, len(chapters) > 1)) for chapter in chapters]
        (output / "report.html").write_text(page("Outrider report", str(directory.absolute()), drawn), encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"{error.filename or output}: {error.strerror or error}") from error
    say(f"{output / 'report.html'}, with its plots as PNG files beside it")


def _chapters(given: argparse.Namespace, say: Say) -> list[Chapter]:
    directory: Path = given.directory
    if directory.is_dir() and not has_records(directory):
        if not rounds(directory):
            raise RecordsError(f"{directory} holds neither records (--records-dir) nor the tables of a rollout")
        if given.verifier or given.since is not None or given.until is not None:
            raise RecordsError("--verifier, --since and --until select from records; this is a rollout")
        return [chapter for chapter in rolled_out(directory) if chapter.workers]
    records = Records(directory, selection_of(given))
    chapters = recorded(records)
    for file in records.unreadable:
        say(f"{file} cannot be read and was skipped")
    return chapters


def _draw(chapter: Chapter, output: Path, several: bool) -> list[Picture]:
    from backend.records.plots import PLOTS

    pictures = []
    for name, (title, text, draw) in PLOTS.items():
        figure = draw(chapter)
        if figure is None:
            continue
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=DPI)
        prefix = chapter.title.replace(", ", "-") + "-" if several else ""
        (output / f"{prefix}{name}.png").write_bytes(data.getvalue())
        pictures.append(Picture(title, text, data.getvalue(), round(96 * figure.get_figwidth())))
    return pictures


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RecordsError("a report needs matplotlib, which is not installed: pip install matplotlib") from error


def _parser() -> argparse.ArgumentParser:
    description = "Draws a recorded period (what verifiers wrote with --records-dir) or a rollout's tables as one HTML page."
    parser = Parser(prog="outrider report", description=description, allow_abbrev=False)
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="records, or a rollout's directory (all of it, a step, a round)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: DIR/report)")
    add_selection(parser)
    return parser
