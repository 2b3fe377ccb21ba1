"""Collects every PromQL expression of the committed dashboards and rules.  Only reads files.  Tests only."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2] / "dashboards"
RULES = ROOT / "prometheus" / "rules"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
}
"""By file name, without `.json`."""
_PICKED = re.compile(r"\$(?:job|model|verifier|drafter)\b")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_METRIC = re.compile(r"\b([A-Za-z_][\w:]*)(?!\w|:|\s*\()\s*(?:\{([^}]*)\})?")
_WORDS = {"and", "or", "unless", "bool", "offset"}


class Expression(NamedTuple):
    """An expression with every Grafana variable set to `All`, and where it is used."""

    where: str
    promql: str


class Names(NamedTuple):
    """`metrics` with the labels in their selectors; `labels` in `by (...)`, `on (...)` and similar clauses."""

    metrics: dict[str, set[str]]
    labels: set[str]


def names(promql: str) -> Names:
    """The names in an expression.  It does not check the grammar: promtool does."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", promql)
    found = Names({}, set(re.findall(r"\w+", " ".join(_LABELS.findall(bare)))))
    for name, selectors in _METRIC.findall(_LABELS.sub(" ", bare)):
        if name not in _WORDS:
            found.metrics.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]", selectors))
    return found


def concrete(promql: str) -> str:
    return _PICKED.sub(".*", promql.replace("$__rate_interval", "1m"))


def of_panels() -> Iterator[Expression]:
    for dashboard in DASHBOARDS.values():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                where = f"{dashboard['title']} / {panel['title']} / {target['refId']}"
                yield Expression(where, concrete(target["expr"]))


def of_variables() -> Iterator[Expression]:
    """The expressions of drop-down lists (the metric inside `label_values`) and of annotations."""
    for dashboard in DASHBOARDS.values():
        for variable in dashboard["templating"]["list"]:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", ""))
            if found:
                yield Expression(f"{dashboard['title']} / ${variable['name']}", f"count by ({found[2]}) ({concrete(found[1])})")
        for each in dashboard["annotations"]["list"]:
            yield Expression(f"{dashboard['title']} / {each['name']}", concrete(each["expr"]))


def of_rules() -> Iterator[Expression]:
    """The expressions of recording and alert rules; `where` is the name of the record or alert."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield Expression(rule.get("record") or rule["alert"], rule["expr"])


def recorded() -> Iterator[Expression]:
    """The recording rules: a record's name has a colon, an alert's has none."""
    return (each for each in of_rules() if ":" in each.where)
