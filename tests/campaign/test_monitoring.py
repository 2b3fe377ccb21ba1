"""A real Prometheus with the committed configuration and rules scrapes a fleet under load: every expression of the dashboards
and rules returns data, and Prometheus and the records agree."""

import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from backend.records.reading import Records
from backend.records.summary import request_speeds, summarise, total
from tests.support.dashboards import ROOT, Expression, of_panels, of_rules, of_variables, recorded
from tests.support.fleet_process import ServedFleet, free_port, wait_for

PROGRAM = shutil.which("prometheus")
USERS = 6
PROMPTS = ["def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n", "for i in "]
SCRAPES = 14
"""Under load: at 5 s each, more than the minute over which panels take rates, and several evaluations of the rules."""
MAY_BE_EMPTY = {
    r"^Outrider\w+:": "the alert does not fire",
    r"\bALERTS\b": "no alert fires",
    r"outrider_recovery_seconds": "no sequence was moved to another verifier",
    r"outrider_ahead_hits_total": "no plan drafts ahead of time",
    r'drafter="lookup"': "no verifier drafted by prompt lookup",
    r"outrider_handover_rows": "no running request was handed to another drafter",
    r"outrider_learning_": "no head learns",
    r"outrider_batch_lines_total": "no batch was sent",
}
"""By a pattern of where and what the expression is: why it may return nothing for a healthy fleet under load."""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.campaign,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus on this machine (Debian: package prometheus)"),
]


@contextmanager
def prometheus_of(fleet: ServedFleet, tmp_path: Path) -> Iterator[httpx.Client]:
    config = yaml.safe_load((ROOT / "prometheus" / "local.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(ROOT / "prometheus" / each) for each in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [httpx.URL(fleet.url).netloc.decode()]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [str(PROGRAM), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}"])
    patient = httpx.HTTPTransport(retries=6)  # The last connection is tried after fifteen seconds.
    with httpx.Client(base_url=f"http://{address}", timeout=30, transport=patient) as client:
        try:
            wait_for(lambda: client.get("/-/ready").is_success, what="Prometheus to be ready")
            yield client
        finally:
            process.terminate()
            process.wait(30)


def query(prometheus: httpx.Client, promql: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each series of the result."""
    answer = prometheus.get("/api/v1/query", params={"query": promql})
    assert answer.is_success, f"{promql}: {answer.text}"
    return [(sample["metric"], float(sample["value"][1])) for sample in answer.json()["data"]["result"]]


def problem(prometheus: httpx.Client, expression: Expression) -> str:
    """What is wrong with the expression's result; "" if nothing is."""
    values = [value for _, value in query(prometheus, expression.promql)]
    if any(math.isnan(value) for value in values):
        return "NaN"
    may_be_empty = any(re.search(pattern, ": ".join(expression)) for pattern in MAY_BE_EMPTY)
    return "" if values or may_be_empty else "nothing"


def scraped_figures(prometheus: httpx.Client) -> dict[str, float]:
    def value(promql: str) -> float:
        ((_, found),) = query(prometheus, promql)
        return found

    lengths = "1 + sum by (drafter) (outrider_accepted_tokens_total) / sum by (drafter) (outrider_drafts_total)"
    return {
        "steps": value("sum(outrider_verifier_steps_total)"),
        "tokens": value("sum(outrider_verifier_tokens_total)"),
        "busy": value("sum(outrider_verifier_busy_seconds_total)"),
        "acceptance length": value("1 + sum(outrider_accepted_tokens_total) / sum(outrider_drafts_total)"),
        **{f"acceptance length, {labels['drafter']}": length for labels, length in query(prometheus, lengths)},
        "TGS decode": value("sum(outrider_tgs_decode_sum) / sum(outrider_tgs_decode_count)"),
        "TGS e2e": value("sum(outrider_tgs_e2e_sum) / sum(outrider_tgs_e2e_count)"),
    }


def recorded_figures(records: Records) -> dict[str, float | None]:
    workers = records.workers()
    summary = summarise(workers)
    speeds = [request_speeds(each.requests) for each in workers]
    return {
        "steps": sum(each.steps.num_rows for each in workers),
        "tokens": summary.tokens,
        "busy": sum(total(each.steps["busy_ms"]) for each in workers) / 1e3,
        "acceptance length": summary.live.acceptance_length,
        **{f"acceptance length, {name}": each.acceptance_length for name, each in summary.by_drafter.items()},
        "TGS decode": float(np.concatenate([decode for decode, _ in speeds]).mean()),
        "TGS e2e": float(np.concatenate([e2e for _, e2e in speeds]).mean()),
    }


def test_expressions_return_data_that_the_records_confirm(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with ServedFleet("--records-dir", str(records)) as fleet, prometheus_of(fleet, tmp_path) as prometheus:
        over = threading.Event()

        def user(number: int) -> None:
            while not over.is_set():
                number += 1
                fleet.complete(PROMPTS[number % len(PROMPTS)], max_tokens=128, temperature=number % 2, seed=number)

        expressions = [*of_panels(), *of_variables(), *of_rules(), *(Expression(each.where, each.where) for each in recorded())]
        with ThreadPoolExecutor(USERS) as pool:
            users = [pool.submit(user, 1000 * number) for number in range(USERS)]
            try:
                wait_for(lambda: query(prometheus, f"count_over_time(up[5m]) >= {SCRAPES}") != [], 150, "scraping under load")
                problems = {each: wrong for each in expressions if (wrong := problem(prometheus, each))}
            finally:
                over.set()
        for each in users:
            each.result()
        assert problems == {}
        rested = time.time() + 2  # The last counters have arrived at the gateway.
        wait_for(lambda: query(prometheus, f"timestamp(up) > {rested}") != [], what="a scrape at rest")
        scraped = scraped_figures(prometheus)
    assert scraped == pytest.approx(recorded_figures(Records(records)), rel=0.02)
