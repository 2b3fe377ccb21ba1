"""Every PromQL expression of the committed dashboards and rules, for the tests and for `check.py`.  Reads files only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent
DASHBOARDS = ROOT / "grafana" / "dashboards"
RULES = ROOT / "prometheus" / "rules"
_VARIABLES = {"$__rate_interval": "1m"}
_PICKED = re.compile(r"\$(?:job|model|verifier|drafter)\b")


class Expression(NamedTuple):
    """Where it stands, and what it says with every variable at `All`."""

    where: str
    promql: str


def concrete(promql: str) -> str:
    """With Grafana's variables filled in."""
    for name, value in _VARIABLES.items():
        promql = promql.replace(name, value)
    return _PICKED.sub(".*", promql)


def of_panels() -> Iterator[Expression]:
    """Of all panels of all dashboards."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                where = f"{dashboard['title']} / {panel['title']} / {target['refId']}"
                yield Expression(where, concrete(target["expr"]))


def of_variables() -> Iterator[Expression]:
    """Of the drop-down lists and annotations: what is inside `label_values`, without the label."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for variable in dashboard["templating"]["list"]:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", ""))
            if found:
                yield Expression(f"{dashboard['title']} / ${variable['name']}", f"count by ({found[2]}) ({concrete(found[1])})")
        for each in dashboard["annotations"]["list"]:
            yield Expression(f"{dashboard['title']} / {each['name']}", concrete(each["expr"]))


def of_rules() -> Iterator[Expression]:
    """Of recording and alert rules; `where` is the record or the alert."""
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                yield Expression(rule.get("record") or rule["alert"], rule["expr"])
