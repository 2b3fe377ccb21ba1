"""Renders a report as one self-contained HTML page: figures as text and tables, plots embedded.  Pure."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow.compute as pc

from backend.records.chapters import Chapter
from backend.records.summary import drafting, total

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 54em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin-bottom: 0 }
h2 { font-size: 1.25em; margin-top: 2.2em; border-bottom: 1px solid #ddd }
h3 { font-size: 1em; margin: 1.8em 0 0 }
p { margin: .3em 0 }
.quiet { color: #666 }
.note { background: #fff6e0; padding: .4em .8em }
table { border-collapse: collapse; margin: .8em 0; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .2em .8em .2em 0; border-bottom: 1px solid #eee }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
th { font-weight: 600; color: #555; vertical-align: bottom }
img { max-width: 100%; height: auto; margin: .4em 0 }
"""


@dataclass(frozen=True)
class Picture:
    """One plot with its title and caption."""

    title: str
    text: str
    png: bytes
    width: int
    """In CSS pixels."""


def page(title: str, about: str, chapters: Sequence[tuple[Chapter, Sequence[Picture]]]) -> str:
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f'<h1>{html.escape(title)}</h1><p class="quiet">{html.escape(about)}</p>',
    ]
    for chapter, pictures in chapters:
        parts.append(f"<h2>{html.escape(chapter.title)}</h2>")
        parts += [f'<p class="note">{html.escape(note)}</p>' for note in chapter.notes]
        parts += [_headline(chapter), _workers(chapter)]
        for picture in pictures:
            data = base64.b64encode(picture.png).decode()
            parts += [
                f'<h3>{html.escape(picture.title)}</h3><p class="quiet">{html.escape(picture.text)}</p>',
                f'<img alt="{html.escape(picture.title)}" width="{picture.width}" src="data:image/png;base64,{data}">',
            ]
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _headline(chapter: Chapter) -> str:
    drafted = drafting(chapter.outcomes)
    tokens = sum(total(worker.steps["tokens"]) for worker in chapter.workers)
    requests = sum(worker.requests.num_rows for worker in chapter.workers)
    begin = min(worker.began_s for worker in chapter.workers)
    wall = max(worker.ended_s for worker in chapter.workers) - begin
    parts = [f"{requests} requests", f"{tokens:.0f} tokens in {wall:.1f} s"]
    if wall > 0:
        parts.append(f"{tokens / wall:.0f} tokens/s")
    if drafted.acceptance_length is not None:
        kind = "teacher-forced acceptance length" if chapter.is_teacher_forced else "acceptance length"
        parts.append(f"{kind} {drafted.acceptance_length:.2f} over {drafted.drafts} drafts")
    return f"<p>{html.escape('; '.join(parts))}.</p>"


def _workers(chapter: Chapter) -> str:
    seconds = ("busy", "awaiting drafts", "other idle", "ended", "alone")
    head = ("worker", "requests", "tokens", "steps", "mean batch", *(f"{name}, s" for name in seconds))
    alone = chapter.alone_s()
    lines = []
    for worker in chapter.workers:
        emitting = worker.steps.filter(pc.greater(worker.steps["requests"], 0))
        waited = worker.idle_s.get("awaiting_draft", 0.0)
        cells = (
            worker.name,
            f"{worker.requests.num_rows}",
            f"{total(worker.steps['tokens']):.0f}",
            f"{worker.steps.num_rows}",
            f"{total(emitting['requests']) / max(1, emitting.num_rows):.1f}",
            f"{worker.busy_s:.2f}",
            f"{waited:.2f}",
            f"{sum(worker.idle_s.values()) - waited:.2f}",
            f"{worker.ended_s:.1f}",
            f"{alone[worker.name]:.1f}",
        )
        lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" + "".join(lines) + "</table>"
