"""Draws the plots of a report.  Needs matplotlib, which is optional; the command-line process.

Every plot is a function that draws one figure of a summary and its workers, or returns None when there is no data for it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.config.sources import CommandError
from backend.records.reading import Numbers, VerifierTables
from backend.records.summary import Summary, step_wall_ms

COLOURS = {"busy": "#3b6ea5", "no_work": "#dddddd", "awaiting_draft": "#d98b3a", "swap": "#c44e52"}
WIDTH = 8.0
DPI = 130
BINS = 120
NAMED = 8
"""Workers that a legend names; with more, there is none."""

Workers = Sequence[VerifierTables]
Plot = Callable[[Workers, Summary], Any | None]


def load(workers: Workers, summary: Summary) -> Any | None:
    """Batch size and TGS over time."""
    figure, (batches, speeds) = _figure(WIDTH, 4.6, 2, sharex=True)
    for worker in workers:
        middles, sizes, tgs = _stretches(worker.steps, summary)
        batches.plot(middles, sizes, label=str(worker.name), linewidth=1.2, marker=".", markersize=3)
        speeds.plot(middles, tgs, linewidth=1.2, marker=".", markersize=3)
    batches.set_ylabel("requests in a step")
    speeds.set_ylabel("TGS, tokens/s\nof one request")
    speeds.set_xlabel("seconds")
    for axes in (batches, speeds):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#eeeeee")
    if 1 < len(workers) <= NAMED:
        figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def acceptance(workers: Workers, summary: Summary) -> Any | None:
    """Acceptance by position and acceptance length by drafter."""
    drafters = summary.by_drafter
    if not drafters:
        return None
    figure, (positions, lengths) = _figure(WIDTH, max(2.8, 1.5 + 0.32 * len(drafters)), 1, 2, width_ratios=(3, 2))
    for place, (name, each) in enumerate(drafters.items()):
        shares = np.divide(each.accepted_by_position, each.drafted_by_position)
        positions.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=f"C{place % 10}")
        bar = lengths.barh([name], [each.acceptance_length], 0.6, color=f"C{place % 10}")
        lengths.bar_label(bar, fmt="%.2f", padding=3)
    positions.set_xlabel("position in the draft")
    positions.set_ylabel("share kept")
    positions.set_ylim(0, 1)
    positions.set_xticks(range(1, 1 + max(len(each.drafted_by_position) for each in drafters.values())))
    positions.grid(axis="y", color="#eeeeee")
    lengths.invert_yaxis()
    lengths.margins(x=0.18)
    lengths.set_xlabel("acceptance length")
    return figure


def idle(workers: Workers, summary: Summary) -> Any | None:
    """Shares of each worker's wall time: busy, and idle by cause."""
    figure, (axes,) = _figure(WIDTH, 1.5 + 0.34 * len(workers))
    seconds = np.array([[each.busy_s, *(each.idle_s[cause] for cause in list(COLOURS)[1:])] for each in summary.workers])
    shares = 100 * seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-9)
    for column, (name, colour) in enumerate(COLOURS.items()):
        label = name if name == "busy" else f"idle: {name.replace('_', ' ')}"
        left = shares[:, :column].sum(axis=1)
        bars = axes.barh(range(len(workers)), shares[:, column], 0.62, left=left, color=colour, label=label)
        axes.bar_label(bars, [f"{share:.0f} %" if share >= 6 else "" for share in shares[:, column]], label_type="center")
    _name_rows(axes, workers)
    axes.set_xlabel("per cent of wall time")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def stragglers(workers: Workers, summary: Summary) -> Any | None:
    """When each worker ran how many requests, and for how long the last one ran after the others."""
    figure, (axes,) = _figure(WIDTH, 1.5 + 0.42 * len(workers))
    sizes = np.array([_stretches(worker.steps, summary)[1] for worker in workers])
    end = max(summary.straggler.finished_s, 1e-3)
    image = axes.imshow(
        sizes, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest", extent=(0, end, len(workers) - 0.5, -0.5)
    )
    _name_rows(axes, workers)
    axes.axvline(end - summary.straggler.behind_the_others_s, color=COLOURS["swap"], linestyle="--")
    axes.set_xlabel("seconds")
    figure.colorbar(image, ax=axes, label="requests in a step")
    return figure


PLOTS: dict[str, tuple[str, str, Plot]] = {
    "load": (
        "Batch size and TGS",
        "Means over equal stretches of time; TGS is tokens / batch size / wall time of the steps.",
        load,
    ),
    "acceptance": (
        "Acceptance",
        "Left: of the drafts that reached a position, the share whose token was kept. Right: 1 + accepted / drafts.",
        acceptance,
    ),
    "idle": ("Busy and idle time", "All of each worker's wall time.", idle),
    "stragglers": ("Who worked when", "The dashed line: the end of the other workers (their median).", stragglers),
}


def draw(workers: Workers, summary: Summary, output: Path) -> list[str]:
    """Draws all plots into PNG files; returns lines of Markdown that show them.  Raises `CommandError`, `OSError`."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError("a report needs matplotlib, which is not installed: pip install matplotlib") from error
    output.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, (title, text, plot) in PLOTS.items():
        figure = plot(workers, summary)
        if figure is not None:
            figure.savefig(output / f"{name}.png", dpi=DPI)
            lines += ["", f"## {title}", "", text, "", f"![{title}]({name}.png)"]
    return lines


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _name_rows(axes: Any, workers: Workers) -> None:
    axes.set_yticks(range(len(workers)), [str(worker.name) for worker in workers])
    axes.set_ylim(len(workers) - 0.5, -0.5)


def _stretches(steps: pa.Table, summary: Summary) -> tuple[Numbers, Numbers, Numbers]:
    """Middle, mean batch size and TGS of each of `BINS` stretches of time; NaN in stretches where no step emitted tokens."""
    steps = steps.filter(pc.greater(steps["requests"], 0))
    requests, tokens = steps["requests"].to_numpy(), steps["tokens"].to_numpy()
    span = (0.0, max(summary.straggler.finished_s, 1e-3))

    def summed(values: Numbers) -> Numbers:
        return np.histogram(steps["began_at"].to_numpy() - summary.began_at, BINS, span, weights=values)[0]

    edges = np.linspace(*span, BINS + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        tgs = 1e3 * summed(tokens) / summed(requests * step_wall_ms(steps))
        return (edges[:-1] + edges[1:]) / 2, summed(requests) / summed(np.ones(len(steps))), tgs
