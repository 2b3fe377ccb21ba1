"""Draws throughput relative to plain decoding, a panel per target and temperature.  Needs matplotlib, which is optional."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from backend.config.sources import Say
from backend.lab.bench.measure import Row, ratios

COLOURS = ("#8c8c8c", "#4878a8", "#d98b3a", "#5a9e6f", "#a05a9e", "#c44e52", "#7f7f2f", "#2f8f9f")
GROUP_WIDTH = 0.82


def draw(rows: Sequence[Row], file: Path, say: Say, paced: str | None = None) -> bool:
    """Writes the picture.  Without matplotlib, prints a message and returns False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no bench.png: matplotlib is not installed (make setup-dev installs it)")
        return False
    targets = list(dict.fromkeys(row.target for row in rows))
    temperatures = sorted({row.point.temperature for row in rows})
    labels = list(dict.fromkeys(row.label for row in rows))
    # The reference is plain decoding, or the first row's way of decoding if plain decoding was not measured.
    reference = "off" if "off" in labels else labels[0]
    colours = dict(zip(labels, itertools.cycle(COLOURS), strict=False))
    size = (1.6 + 3.6 * len(targets), 1.5 + 2.7 * len(temperatures))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(temperatures), len(targets), squeeze=False, sharey="row")
    for line, temperature in enumerate(temperatures):
        for column, target in enumerate(targets):
            shown = [row for row in rows if row.target == target and row.point.temperature == temperature]
            _panel(panels[line][column], shown, reference, colours)
            panels[line][column].set_title(f"{target}, {'greedy' if not temperature else f'temperature {temperature:g}'}")
        panels[line][0].set_ylabel(f"throughput / {reference}")
    for panel in panels[-1]:
        panel.set_xlabel("requests in flight")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2 * len(targets), frameon=False)
    title = f"Medians (least and greatest) of {max(len(row.samples) for row in rows)} rounds"
    # Its details are in bench.md: they are longer than a narrow picture.
    figure.suptitle(title + (f"\npaced as {paced.split(';')[0]}".replace(": ", ":\n", 1) if paced else ""), fontsize="medium")
    figure.savefig(file, dpi=150)
    return True


def _panel(axes: Any, rows: Sequence[Row], reference: str, colours: Mapping[str, str]) -> None:
    """Draws bars in groups by concurrency; a way of decoding has the same place and colour in every group."""
    levels = sorted({row.point.concurrency for row in rows})
    width = GROUP_WIDTH / len(colours)
    by_place = {(row.label, row.point.concurrency): row for row in rows}
    for place, (label, colour) in enumerate(colours.items()):
        measured = [(group, level) for group, level in enumerate(levels) if (label, level) in by_place]
        bars = {group: ratios(by_place[label, level], by_place.get((reference, level))) for group, level in measured}
        bars = {group: values for group, values in bars.items() if values}
        axes.bar(
            [group + (place - (len(colours) - 1) / 2) * width for group in bars],
            [median(v) for v in bars.values()],
            width * 0.92,
            yerr=[[median(v) - min(v) for v in bars.values()], [max(v) - median(v) for v in bars.values()]],
            label=label,
            color=colour,
            error_kw={"elinewidth": 0.8, "capsize": 1.5, "ecolor": "#333333"},
        )
    axes.axhline(1.0, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xticks(range(len(levels)), [str(level) for level in levels])
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
