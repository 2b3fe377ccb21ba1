"""Collects every PromQL expression of the committed dashboards and rules, for tests and `check.py`.  Only reads files."""

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
MAY_BE_EMPTY = (
    (r"^Outrider\w+$", r"", "the alert does not fire"),
    (r"", r"\bALERTS\b", "no alert fires"),
    (r"", r"outrider_recovery_seconds", "no sequence was moved to another verifier"),
    (r"", r"outrider_ahead_hits_total", "no plan drafts ahead of time"),
    (r"", r'drafter="lookup"', "no verifier drafted by prompt lookup"),
    (r"", r"outrider_handover_rows", "no running request was handed to another drafter"),
)
"""Pattern of `where`, pattern of the expression, and why it may return nothing for a healthy fleet under load."""
_PICKED = re.compile(r"\$(?:job|model|verifier|drafter)\b")


class Expression(NamedTuple):
    """An expression with every Grafana variable set to `All`, and where it is used."""

    where: str
    promql: str


def concrete(promql: str) -> str:
    for name, value in _VARIABLES.items():
        promql = promql.replace(name, value)
    return _PICKED.sub(".*", promql)


def of_panels() -> Iterator[Expression]:
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                where = f"{dashboard['title']} / {panel['title']} / {target['refId']}"
                yield Expression(where, concrete(target["expr"]))


def of_variables() -> Iterator[Expression]:
    """The expressions of drop-down lists (the metric inside `label_values`) and of annotations."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
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


def of_recordings() -> Iterator[Expression]:
    """The recorded series of recording rules: they exist if Prometheus has loaded and evaluated the rules."""
    for each in of_rules():
        if ":" in each.where:
            yield Expression(f"recorded {each.where}", each.where)


def may_be_empty(expression: Expression) -> str:
    """Why the expression may return nothing; "" if it must return data."""
    for where, promql, reason in MAY_BE_EMPTY:
        if re.search(where, expression.where) and re.search(promql, expression.promql):
            return reason
    return ""
