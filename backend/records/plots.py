"""Draws the plots of a report.  Needs matplotlib, which is optional; the command-line process.

Every public function draws one matplotlib figure of a chapter, or returns None when there is no data for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.records.chapters import Chapter, Worker
from backend.records.reading import Numbers
from backend.records.summary import by_drafter

COLOURS = ("#3b6ea5", "#d98b3a", "#5a9e6f", "#a05a9e", "#c44e52", "#7f7f2f", "#2f8f9f", "#8c8c8c")
IDLE_COLOURS = {
    "no_work": "#dddddd",
    "awaiting_draft": "#d98b3a",
    "swap": "#c44e52",
    "any cause": "#d98b3a",
}
BUSY_COLOUR = "#3b6ea5"
INK = "#333333"
LABEL, TICK = 9, 8
WIDTH = 8.0
BINS = 120
NAMED = 8
"""With more workers than this, all are drawn in one colour, without a legend."""


def load(chapter: Chapter) -> Any | None:
    """Batch size and TGS over time."""
    begin, end = _span(chapter.workers)
    figure, (batches, speeds) = _figure(WIDTH, 4.6, 2, sharex=True)
    for place, worker in enumerate(chapter.workers):
        middles, sizes, tgs = _stretches(worker.steps, begin, end)
        style = _style(place, len(chapter.workers))
        batches.plot(middles, sizes, label=worker.name, **style)
        speeds.plot(middles, tgs, label=worker.name, **style)
    batches.set_ylabel("requests in a step")
    batches.yaxis.get_major_locator().set_params(integer=True)
    speeds.set_ylabel("TGS, tokens/s\nof one request")
    speeds.set_xlabel("seconds")
    for axes in (batches, speeds):
        axes.set_ylim(bottom=0)
        axes.set_xlim(begin, end)
        axes.grid(axis="y", color="#eeeeee")
    _legend(figure, batches, len(chapter.workers))
    return figure


def acceptance(chapter: Chapter) -> Any | None:
    """Acceptance by position and acceptance length by drafter."""
    drafters = by_drafter(chapter.outcomes)
    if not drafters:
        return None
    figure, (positions, lengths) = _figure(WIDTH, max(2.8, 1.5 + 0.32 * len(drafters)), 1, 2, width_ratios=(3, 2))
    for place, (name, each) in enumerate(drafters.items()):
        shares = [a / d for a, d in zip(each.accepted_by_position, each.drafted_by_position, strict=True)]
        style = _style(place, len(drafters)) | {"marker": "o", "markersize": 4}
        positions.plot(range(1, len(shares) + 1), shares, label=name, **style)
    positions.set_xlabel("position in the draft")
    positions.set_ylabel("share kept")
    positions.set_ylim(0, 1)
    longest = max(len(each.drafted_by_position) for each in drafters.values())
    positions.set_xticks(range(1, longest + 1))
    positions.set_xlim(0.7, longest + 0.3)
    positions.grid(axis="y", color="#eeeeee")
    names, values = list(drafters), [each.acceptance_length or 0.0 for each in drafters.values()]
    colours = [_style(place, len(drafters))["color"] for place in range(len(names))]
    bars = lengths.barh(range(len(names)), values, 0.6 if len(names) > 1 else 0.3, color=colours)
    lengths.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    lengths.set_yticks(range(len(names)), names)
    lengths.invert_yaxis()
    lengths.set_ylim(len(names) - 0.3, -0.7)
    lengths.set_xlim(0, 1.18 * max(values))
    lengths.set_xlabel("acceptance length")
    return figure


def markov(chapter: Chapter) -> Any | None:
    """Probability of keeping j draft tokens when the request's previous verification kept i, as a matrix."""
    counts = chapter.transitions()
    if not counts:
        return None
    size = max(max(pair) for pair in counts) + 1
    matrix = np.array([[counts[last, following] for following in range(size)] for last in range(size)])
    sums = matrix.sum(axis=1, keepdims=True)
    shares = matrix / np.where(sums, sums, np.nan)
    side = min(WIDTH - 1, 1.6 + 0.5 * size)
    figure, (axes,) = _figure(side + 1, side)
    most = np.nanmax(shares)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=most)
    axes.set_xlabel("draft tokens kept next")
    axes.set_ylabel("draft tokens kept last")
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if size <= 12:
        for (i, j), share in np.ndenumerate(shares):
            if not math.isnan(share):
                ink = "white" if share > 0.5 * most else INK
                axes.text(j, i, f"{share:.2f}", ha="center", va="center", color=ink, fontsize=TICK)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("probability", size=LABEL)
    bar.ax.tick_params(labelsize=TICK, length=0)
    bar.outline.set_visible(False)
    return figure


def idle(chapter: Chapter) -> Any | None:
    """Shares of each worker's wall time: busy, and idle by cause."""
    workers = chapter.workers
    figure, (axes,) = _figure(WIDTH, 1.5 + 0.34 * len(workers))
    causes = [cause for cause in IDLE_COLOURS if any(worker.idle_s.get(cause) for worker in workers)]
    left = [0.0] * len(workers)
    for name, colour in [("busy", BUSY_COLOUR), *((cause, IDLE_COLOURS[cause]) for cause in causes)]:
        seconds = [worker.busy_s if name == "busy" else worker.idle_s.get(name, 0.0) for worker in workers]
        walls = [(worker.busy_s + sum(worker.idle_s.values())) or 1.0 for worker in workers]
        shares = [100 * part / wall for part, wall in zip(seconds, walls, strict=True)]
        label = "busy" if name == "busy" else f"idle: {name.replace('_', ' ')}"
        bars = axes.barh(range(len(workers)), shares, 0.62, left=left, color=colour, label=label)
        texts = [f"{share:.0f} %" if share >= 6 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", color=INK if name == "no_work" else "white", fontsize=TICK)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    _worker_axis(axes, workers)
    axes.set_xlim(0, 100)
    axes.set_xlabel("per cent of wall time")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=LABEL)
    return figure


def responses(chapter: Chapter) -> Any | None:
    """Lengths of responses, and the number of verifications for each."""
    lengths = [n for worker in chapter.workers for n in worker.requests["tokens"].to_pylist()]
    taken = [n for worker in chapter.workers for n in worker.requests["verifications"].to_pylist()]
    longest = max(lengths, default=0)
    if not longest:
        return None
    figure, (counts, steps) = _figure(WIDTH, 4.6, 2, sharex=True, height_ratios=(1, 2))
    counts.hist(lengths, bins=min(40, max(5, longest)), range=(0, longest), color=COLOURS[0], edgecolor="white", linewidth=0.4)
    counts.set_ylabel("requests")
    counts.yaxis.get_major_locator().set_params(integer=True)
    steps.scatter(lengths, taken, s=10, alpha=max(0.08, min(0.8, 60 / len(lengths))), color=COLOURS[0], linewidths=0)
    steps.plot([0, longest], [0, longest], color=INK, linewidth=0.9, linestyle="--", label="one token per verification")
    steps.legend(loc="upper left", frameon=False, fontsize=LABEL)
    steps.set_xlabel("response length, tokens")
    steps.set_ylabel("verifications")
    steps.set_xlim(0, longest * 1.03)
    steps.set_ylim(0, max([*taken, longest]) * 1.05)
    steps.grid(color="#eeeeee")
    steps.set_axisbelow(True)
    return figure


def stragglers(chapter: Chapter) -> Any | None:
    """Each worker's batch sizes over time, when it ended, and how long the last worker ran alone."""
    workers, alone = chapter.workers, chapter.alone_s()
    begin, end = _span(workers)
    width = (end - begin) / BINS
    figure, (axes,) = _figure(WIDTH, 1.5 + 0.42 * len(workers))
    most = max((pc.max(worker.steps["requests"]).as_py() for worker in workers), default=1) or 1
    for place, worker in enumerate(workers):
        middles, sizes, _ = _stretches(worker.steps, begin, end)
        for middle, size in zip(middles, sizes, strict=True):
            if not math.isnan(size):
                left, alpha = middle - width / 2, 0.25 + 0.75 * size / most
                axes.barh(place, width, 0.6, left=left, color=BUSY_COLOUR, alpha=alpha, linewidth=0)
        text = f"ended at {worker.ended_s:.1f} s"
        if alone[worker.name] > 0:
            start = worker.ended_s - alone[worker.name]
            axes.barh(place, alone[worker.name], 0.84, left=start, fill=False, edgecolor="#c44e52", linewidth=1.4)
            text += f", {alone[worker.name]:.1f} s alone"
        axes.text(worker.ended_s + 0.01 * (end - begin), place, text, va="center", fontsize=TICK, color=INK)
    _worker_axis(axes, workers)
    axes.set_xlim(begin, begin + 1.3 * (end - begin))
    axes.set_xlabel(f"seconds (darker: more requests in a step, {most} at most)")
    return figure


PLOTS: dict[str, tuple[str, str, Callable[[Chapter], Any | None]]] = {
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
    "markov": (
        "From one verification to the next",
        "Each row: of the verifications that kept so many draft tokens, how many the same request's next one kept.",
        markov,
    ),
    "idle": ("Busy and idle time", "All of each worker's wall time.", idle),
    "responses": ("Response lengths", "Below the dashed line drafts saved target steps; each dot is a request.", responses),
    "stragglers": ("Who worked when", "Framed: the last worker, after all others had ended.", stragglers),
}


# Helpers that the figures share.


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=TICK)
        for axis in (panel.xaxis, panel.yaxis):
            axis.label.set_size(LABEL)
    return figure, panels


def _style(place: int, count: int) -> dict[str, Any]:
    if count > NAMED:
        return {"color": "#3b6ea5", "alpha": 0.35, "linewidth": 0.8}
    return {"color": COLOURS[place % len(COLOURS)], "linewidth": 1.4}


def _legend(figure: Any, axes: Any, count: int) -> None:
    if 1 < count <= NAMED:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, count), frameon=False, fontsize=LABEL)


def _worker_axis(axes: Any, workers: Sequence[Worker]) -> None:
    axes.set_yticks(range(len(workers)), [worker.name for worker in workers])
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _span(workers: Sequence[Worker]) -> tuple[float, float]:
    begin = min(worker.began_s for worker in workers)
    end = max(max(worker.ended_s, pc.max(worker.steps["at"]).as_py()) for worker in workers)
    return begin, max(end, begin + 1e-3)


def _stretches(steps: pa.Table, begin: float, end: float) -> tuple[Numbers, Numbers, Numbers]:
    """Middle, mean batch size and TGS of each of `BINS` stretches of time; NaN in stretches where no step emitted tokens."""
    steps = steps.filter(pc.greater(steps["requests"], 0))
    at, requests, tokens, wall_ms = (steps[name].to_numpy() for name in ("at", "requests", "tokens", "wall_ms"))
    counts, edges = np.histogram(at, BINS, (begin, end))

    def summed(values: Numbers) -> Numbers:
        return np.histogram(at, BINS, (begin, end), weights=values)[0]

    with np.errstate(divide="ignore", invalid="ignore"):
        return (edges[:-1] + edges[1:]) / 2, summed(requests) / counts, 1e3 * summed(tokens) / summed(requests * wall_ms)
