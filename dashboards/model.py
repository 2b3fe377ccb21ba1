"""The types that dashboards are made of, and their conversion to Grafana's JSON.  Pure; a command-line tool's process.

They cover only what our panels need: one data source chosen on the page, a grid of 24 columns filled from the left, units,
legends, thresholds, and a description on every panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["timeseries", "stat", "table"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """One panel below its title.  `queries` are expressions by legend, in Grafana's `{{label}}` form.

    `thresholds` are pairs of a value and the colour from this value on.  `empty` is the text of a panel without data.
    """

    about: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int | None = None
    """Columns; None: the row's panels share its width if there are one or two, else each has a third."""
    height: int = 7
    thresholds: Sequence[tuple[float, str]] = ()
    empty: str = "no data yet"
    low: float = 0
    high: float | None = None
    decimals: int | None = None
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """One dashboard.  `uid` is part of its URL and must never change."""

    uid: str
    title: str
    about: str
    rows: Mapping[str, Mapping[str, Panel]]
    """By heading: the panels below it, by title."""


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["outrider"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {"type": "dashboards", "title": "Outrider", "tags": ["outrider"], "asDropdown": True, "includeVars": True,
             "keepTime": True},
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": [_alerts()]},
        "panels": list(_panels(dashboard.rows)),
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    """The drop-down lists; the choice in each restricts the lists after it."""
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0},
        _variable("job", "Job", "label_values(outrider_verifiers_connected, job)"),
        _variable("model", "Model", 'label_values(outrider_verifier_info{job=~"$job"}, model)'),
        _variable("verifier", "Verifier", 'label_values(outrider_verifier_info{job=~"$job", model=~"$model"}, verifier)'),
        _variable("drafter", "Drafter", 'label_values(outrider_drafts_total{job=~"$job", verifier=~"$verifier"}, drafter)'),
    ]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 7,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing", alertname=~"Outrider.*", job=~"$job"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{verifier}} {{kind}}",
        "step": "10s",
    }


def _panels(rows: Mapping[str, Mapping[str, Panel]]) -> Iterator[dict[str, Any]]:
    number, y = 0, 0
    for heading, panels in rows.items():
        number += 1
        yield {"id": number, "type": "row", "title": heading, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}}  # fmt: skip
        x, y, tallest = 0, y + 1, 0
        for title, panel in panels.items():
            width = panel.width or COLUMNS // min(len(panels), 3)
            if x + width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield _panel(title, panel, number, {"x": x, "y": y, "w": width, "h": panel.height})
            x, tallest = x + width, max(tallest, panel.height)
        y += tallest


def _panel(title: str, panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    instant = panel.kind == "table"
    return {
        "id": number,
        "type": panel.kind,
        "title": title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr,
             "legendFormat": legend or "__auto", "instant": instant, "range": not instant,
             "format": "table" if instant else "time_series"}
            for index, (legend, expr) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }  # fmt: skip


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green" if panel.thresholds else "blue", "value": None}]
    steps += [{"color": color, "value": value} for value, color in panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "noValue": panel.empty,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "thresholds" if panel.kind == "stat" else "palette-classic"},
    }
    for name, value in (("min", panel.low), ("max", panel.high), ("decimals", panel.decimals)):
        if value is not None:
            defaults[name] = value
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.thresholds else "off"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "mean"]}
        return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "table":
        return {"showHeader": True, "cellHeight": "sm"}
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"reduceOptions": reduce, "graphMode": "area", "colorMode": "value", "textMode": "auto"}
