"""Dashboards and rules: up to date, complete, and about metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards.build import ALL, outdated
from dashboards.expressions import DASHBOARDS, ROOT, RULES, concrete, of_panels, of_rules, of_variables
from gateway.metrics import DEFINITIONS
from tests.support.promql import names

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine (Debian: package prometheus)")
FILES = sorted(DASHBOARDS.glob("*.json"))
PANELS = [(path.name, panel) for path in FILES for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]
TESTS = ROOT / "prometheus" / "tests" / "alerts.yml"


def test_the_committed_files_are_what_the_builder_writes():
    assert outdated() == [], "run `python -m dashboards.build`"
    assert len(FILES) == len(ALL) == 5


@pytest.mark.parametrize(("file", "panel"), PANELS, ids=lambda each: each["title"] if isinstance(each, dict) else each)
def test_every_panel_explains_itself(file, panel):
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"]) > 15
    assert panel["description"].endswith((".", "?"))
    assert defaults["unit"]
    assert defaults["noValue"]
    assert panel["targets"]
    for target in panel["targets"]:
        if panel["type"] == "timeseries":
            assert target["legendFormat"] != "__auto"
        named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert named <= names(concrete(target["expr"])).labels | {"instance"}, (
            "the legend names a label that is aggregated away"
        )


def test_panels_do_not_overlap_and_have_numbers_of_their_own():
    for path in FILES:
        taken: set[tuple[int, int]] = set()
        numbers: set[int] = set()
        for panel in json.loads(path.read_text())["panels"]:
            assert panel["id"] not in numbers
            numbers.add(panel["id"])
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
            assert not cells & taken, f"{path.name}: {panel['title']}"
            taken |= cells


def test_ratios_are_of_sums():
    for each in [*of_panels(), *of_rules()]:
        assert "avg(outrider_acceptance_length" not in each.promql
        assert "outrider_acceptance_length{" not in each.promql, f"{each.where}: the gauge is since the start, not of late"


def test_names_are_found():
    found = names('1 + sum by (a, b) (rate(m_total{x="y{z}", w=~"."}[1m])) / on (c) group_left (d) (rec:m:rate1m > 0)')
    assert found.metrics == {"m_total": {"x", "w"}, "rec:m:rate1m": set()}
    assert found.labels == {"a", "b", "c", "d"}
    with pytest.raises(ValueError, match="no PromQL"):
        names("a ? b")


def test_variables_are_filled_in():
    assert concrete('rate(m{job=~"$job", drafter=~"$drafter"}[$__rate_interval])') == 'rate(m{job=~".*", drafter=~".*"}[1m])'
    assert all("$" not in each.promql for each in [*of_panels(), *of_variables(), *of_rules()])


def test_every_metric_has_a_panel():
    shown = {name for each in of_panels() for name in names(each.promql).metrics}
    shown |= {name.removesuffix("_bucket") for name in shown}
    # The gauge is for people with curl; the totals by position under vLLM's name are its benchmark client's.
    for name in DEFINITIONS.keys() - {"outrider_acceptance_length"}:
        assert name in shown or name.startswith("vllm:"), f"no panel shows {name}"


def test_every_alert_is_tested_and_says_what_to_do():
    tested = TESTS.read_text()
    documented = (ROOT.parent / "docs" / "monitoring.md").read_text()
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    assert f"alertname: {rule['alert']}\n" in tested, rule["alert"]
                    assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in documented, rule["alert"]
                    assert rule["labels"]["severity"] in ("critical", "warning")
                    assert rule["annotations"].keys() == {"summary", "description"}


def test_provisioning_names_what_is_there():
    (source,) = yaml.safe_load((ROOT / "grafana/provisioning/datasources/outrider.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/outrider.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    for name in ("prometheus.yml", "local.yml"):
        config = yaml.safe_load((ROOT / "prometheus" / name).read_text())
        assert [each["job_name"] for each in config["scrape_configs"]] == ["outrider"]


def promtool(*arguments: object) -> None:
    done = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_every_expression(tmp_path: Path):
    rules = [{"record": f"panel:{number}", "expr": each.promql} for number, each in enumerate([*of_panels(), *of_variables()])]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", file)
    promtool("check", "config", ROOT / "prometheus" / "prometheus.yml", ROOT / "prometheus" / "local.yml")


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then():
    promtool("test", "rules", TESTS)
