"""Every metric and label that a dashboard or a rule names is in a scrape of a gateway."""

from prometheus_client.parser import text_string_to_metric_families

from dashboards.expressions import of_panels, of_rules, of_variables
from gateway.metrics import DEFINITIONS
from tests.support.fake_verifier import eventually
from tests.support.promql import names
from tests.support.running_gateway import COMPLETION

BY_PROMETHEUS = {"job", "instance"}
OF_PROMETHEUS = {"up": set(), "ALERTS": {"alertname", "alertstate"}}


async def test_dashboards_and_rules_name_only_what_is_there(running):
    await running.http.post("/v1/completions", json=COMPLETION)
    running.verifier.send_stats()
    await eventually(lambda: running.core.stats() != [])
    scraped = (await running.http.get("/metrics")).text
    known: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
        if not family.samples:
            # Exported, but nothing has happened to it here.
            suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
            of_family = DEFINITIONS.get(family.name) or DEFINITIONS[f"{family.name}_total"]
            known |= {family.name + suffix: {*of_family.labels, "le"} for suffix in suffixes}
    rules = list(of_rules())
    recorded = {each.where for each in rules if ":" in each.where}
    expressions = [*of_panels(), *of_variables(), *rules]
    assert len(expressions) > 100
    for each in expressions:
        found = names(each.promql)
        labels = set(BY_PROMETHEUS)
        for metric, selected in found.metrics.items():
            assert metric in known or metric in recorded, f"{each.where}: no gateway exports {metric}"
            of_metric = known.get(metric) or {"verifier", "drafter", "cause", "reason", "code"}
            assert selected <= of_metric | BY_PROMETHEUS, f"{each.where}: {metric} has no label {selected - of_metric}"
            labels |= of_metric
        assert found.labels <= labels, f"{each.where}: nothing in it has a label {found.labels - labels}"
