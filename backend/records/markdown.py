"""Tables in Markdown, and those of a summary.  Pure."""

from collections.abc import Sequence
from typing import Any

from backend.records.summary import Drafting, Summary

FORCED = "Responses were fixed: acceptance is **teacher-forced** (agreement with the trace), no live figure."


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table, after an empty one; without rows, only that."""
    cells = (head, ["---"] * len(head), *rows) if rows else ()
    return ["", *("| " + " | ".join(map(str, row)) + " |" for row in cells)]


def sections(summary: Summary) -> list[str]:
    """The tables of a summary."""
    drafts = {"live": summary.live, "live, made ahead": summary.ahead, "teacher-forced": summary.teacher_forced}
    drafts |= {f"by {name}": each for name, each in summary.by_drafter.items()}
    lines = table(
        ("drafts", "number", "acceptance length", "acceptance rate", "accepted by position"),
        [(name, *_drafting(each)) for name, each in drafts.items() if each.drafts],
    )
    lines += table(
        ("worker", "requests", "tokens", "steps", "batch mean/max", "verify s", "busy s", "idle s, by cause", "done s"),
        [
            (
                each.worker,
                each.requests,
                each.tokens,
                each.steps,
                f"{each.batch_mean:.1f}/{each.batch_max}",
                f"{each.verify_s:.2f}",
                f"{each.busy_s:.2f}",
                ", ".join(f"{cause} {idle:.2f}" for cause, idle in each.idle_s.items() if idle),
                f"{each.finished_s:.1f}",
            )
            for each in summary.workers
        ],
    )
    return lines + table(
        ("", "mean", "least", "10 %", "median", "90 %", "most", "sum"),
        [
            (name, *(_rounded(value) for value in (each.mean, each.min, each.p10, each.median, each.p90, each.max, each.sum)))
            for name, each in summary.summary.items()
        ],
    )


def _rounded(value: float) -> str:
    """Three significant digits, or all digits of larger whole numbers."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _drafting(each: Drafting) -> tuple[str, ...]:
    shares = zip(each.accepted_by_position, each.drafted_by_position, strict=True)
    positions = " ".join(f"{accepted / drafted:.2f}" for accepted, drafted in shares)
    return str(each.drafts), f"{each.acceptance_length:.2f}", f"{each.accepted / each.draft_tokens:.2f}", positions
