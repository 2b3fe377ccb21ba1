"""Dashboards and rules: complete, readable, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from gateway.metrics.gateway import DEFINITIONS
from tests.support.dashboards import DASHBOARDS, ROOT, RULES, concrete, names, of_panels, of_rules, of_variables, recorded

PROMTOOL = shutil.which("promtool")
PANELS = [(file, panel) for file, each in DASHBOARDS.items() for panel in each["panels"] if panel["type"] != "row"]
TESTS = ROOT / "prometheus" / "tests" / "alerts.yml"
DOCUMENTED = (ROOT.parent / "docs" / "operate" / "monitoring.md").read_text(encoding="utf-8")
BY_PROMETHEUS = {"job", "instance"}


@pytest.mark.parametrize("file", DASHBOARDS)
def test_every_dashboard_has_an_address_that_stays_and_is_formatted_as_grafana_exports_it(file: str) -> None:
    dashboard = DASHBOARDS[file]
    text = (ROOT / "grafana" / "dashboards" / f"{file}.json").read_text(encoding="utf-8")
    assert text.rstrip() == json.dumps(dashboard, indent=2, ensure_ascii=False)
    assert dashboard["uid"] == file
    assert "id" not in dashboard, "it would be another dashboard's in another Grafana"
    assert f"| {dashboard['title']} |" in DOCUMENTED
    assert len(dashboard["description"]) > 15
    chosen = re.findall(r'"datasource": {\s*"type": "prometheus",\s*"uid": "\${datasource}"\s*}', text)
    assert text.count('"datasource": ') == len(chosen) > 0, "it is bound to no data source"


@pytest.mark.parametrize(("file", "panel"), PANELS, ids=lambda each: each["title"] if isinstance(each, dict) else each)
def test_every_panel_explains_itself(file, panel):
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"]) > 15
    assert panel["description"].endswith((".", "?"))
    assert defaults["unit"]
    assert defaults["noValue"]
    assert panel["targets"]
    for target in panel["targets"]:
        legend, promql = target["legendFormat"], target["expr"]
        assert panel["type"] != "timeseries" or legend != "__auto"
        aggregated = set(re.findall(r"{{(\w+)}}", legend)) - names(concrete(promql)).labels - {"instance", "gateway"}
        assert not aggregated, "the legend names a label that is aggregated away"
        if legend.startswith("{{instance}}") and not promql.startswith("up{"):
            assert "{{gateway}}" in legend, "processes of one gateway are told apart"


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    for file, dashboard in DASHBOARDS.items():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, f"{file}: {panel['title']}"
            taken |= cells
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(numbers)) == len(numbers)


def test_what_every_gateway_exports_is_counted_once_and_ratios_are_of_sums():
    for each in [*of_panels(), *of_rules()]:
        assert "avg(outrider_acceptance_length" not in each.promql
        assert "outrider_acceptance_length{" not in each.promql, f"{each.where}: the gauge is since the start, not of late"
    for each in of_panels():
        for metric in names(each.promql).metrics:
            if {"verifier", "drafter"} & set(DEFINITIONS[metric].labels if metric in DEFINITIONS else ()):
                once = re.findall(rf"max by \(job\b[^)]*\) \((?:\w+\()?{metric}\b", each.promql)
                assert len(once) == len(re.findall(rf"\b{metric}\b", each.promql)), f"{each.where}: {metric}"
    # Verifiers hold at most an eighth more than they run: their counts alone would never look like a queue.
    (waiting,) = (each.promql for each in recorded() if each.where == "job:outrider_waiting:sum")
    assert "sum by (job) (outrider_queue_sequences)" in waiting
    (queue,) = (panel for file, panel in PANELS if file == "outrider-overview" and panel["title"] == "Queue")
    assert "+ sum(outrider_queue_sequences{" in queue["targets"][0]["expr"]


def test_every_metric_and_label_exists():
    known = {"up": BY_PROMETHEUS, "ALERTS": BY_PROMETHEUS | {"alertname", "alertstate"}}
    for name, of_name in DEFINITIONS.items():
        labels = {*of_name.labels, *BY_PROMETHEUS}
        if of_name.kind == "histogram":
            known |= {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
        else:
            known[name] = labels
    known |= {each.where: names(each.promql).labels for each in recorded()}
    expressions = [*of_panels(), *of_variables(), *of_rules()]
    assert len(expressions) > 100
    for each in expressions:
        found = names(each.promql)
        possible: set[str] = set()
        for metric, selected in found.metrics.items():
            assert metric in known, f"{each.where}: nothing is called {metric}"
            assert selected <= known[metric], f"{each.where}: {metric} has no label {selected - known[metric]}"
            possible |= known[metric]
        assert found.labels <= possible, f"{each.where}: nothing in it has a label {found.labels - possible}"


def test_every_alert_is_tested_and_says_what_to_do():
    tested = TESTS.read_text()
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    assert f"alertname: {rule['alert']}\n" in tested, rule["alert"]
                    assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in DOCUMENTED, rule["alert"]
                    assert rule["labels"]["severity"] in ("critical", "warning")
                    assert rule["annotations"].keys() == {"summary", "description"}


def promtool(*arguments: object) -> None:
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine (Debian: package prometheus)")
def test_prometheus_takes_every_expression_and_the_alerts_fire_when_they_should_and_only_then(tmp_path: Path):
    rules = [{"record": f"panel:{number}", "expr": each.promql} for number, each in enumerate([*of_panels(), *of_variables()])]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)
    promtool("check", "config", ROOT / "prometheus" / "prometheus.yml", ROOT / "prometheus" / "local.yml")
    promtool("test", "rules", TESTS)
