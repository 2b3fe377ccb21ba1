"""A Prometheus and the records told of the same period: they agree where they should, and a difference is seen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.comparing import Quantity, compare, quantile, table
from dashboards.expressions import Expression, may_be_empty
from dashboards.scraping import PROGRAM_VARIABLE, PrometheusError, Series, find_program
from tests.support.recorded import START, Rows, record, request, step, verification

Scrape = dict[str, Series]
V0 = {"verifier": "verifier-0"}


class SequenceStatistics:
    """As much of Prometheus as the comparison asks: aggregations that keep some labels, at two moments."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._scrapes = {START: before, START + 10: after}

    def query(self, promql: str, at: float | None = None) -> Series:
        found = re.fullmatch(r"(?:max|sum)(?: by \(([\w, ]+)\) )?\((\w+)\)", promql)
        assert found, promql
        assert at is not None
        kept = (found[1] or "").split(", ")
        series = self._scrapes[at].get(found[2], [])
        return [({name: value for name, value in labels.items() if name in kept}, value) for labels, value in series]


def scrape(scale: Callable[[str], float] = lambda name: 1.0) -> Scrape:
    """The counters that these rows' verifier would have had at the end."""

    def one(name: str, value: float, **labels: str) -> tuple[str, dict[str, str], float]:
        return name, V0 | labels, value * scale(name)

    told = [
        one("outrider_verifier_steps_total", 2),
        one("outrider_verifier_tokens_total", 12),
        one("outrider_verifier_verifications_total", 4),
        one("outrider_verifier_busy_seconds_total", 0.02),
        one("outrider_verifier_verify_seconds_total", 0.016),
        one("outrider_verifier_idle_seconds_total", 9.975, cause="no_work"),
        one("outrider_verifier_idle_seconds_total", 0.005, cause="awaiting_draft"),
        one("outrider_drafts_total", 1, drafter="drafter-0"),
        one("outrider_drafts_total", 2, drafter="lookup"),
        one("outrider_accepted_tokens_total", 4, drafter="drafter-0"),
        one("outrider_accepted_tokens_total", 4, drafter="lookup"),
        one("outrider_tgs_decode_count", 1),
        one("outrider_tgs_decode_sum", 11 / 0.02),
        *(one("outrider_tgs_decode_bucket", float(le >= 550), le=str(le)) for le in (500, 1000, math.inf)),
    ]
    found: Scrape = {}
    for name, labels, value in told:
        found.setdefault(name, []).append((labels, value))
    return found


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Two steps at 5 s, idle before and behind them; the step behind the period tells of the latter."""
    rows: Rows = [
        step(0, 5.0, no_work=5000.0),
        verification(0, "a", 0, 0),
        verification(0, "b", 4, 4),
        step(1, 5.015, awaiting_draft=5.0),
        verification(1, "a", 4, 2, "lookup"),
        verification(1, "b", 4, 2, "lookup"),
        request("a", 4.9, 5.005, 5.025, 12),
        step(2, 20.0, no_work=14_975.0),
        verification(2, "c", 4, 0),
    ]
    record(tmp_path, rows)
    return tmp_path


def compared(records: Path, before: Scrape, after: Scrape) -> dict[str, Quantity]:
    told: object = SequenceStatistics(before, after)
    return {each.name: each for each in compare(told, records, START, START + 10)}  # type: ignore[arg-type]


def test_they_agree_on_the_same_period(records: Path) -> None:
    found = compared(records, {}, scrape())
    differing = [each for each in found.values() if not each.agrees and not each.name.startswith("TGS e2e")]
    assert differing == []
    assert found["acceptance length"].prometheus == found["acceptance length"].records == 1 + 8 / 3
    assert found["acceptance length, lookup"].records == 3
    assert found["idle no_work share"].records == pytest.approx(0.9975)
    assert found["idle awaiting_draft share"].records == pytest.approx(0.0005)
    assert found["TGS decode, mean"].records == pytest.approx(550)
    assert found["busy + idle, s"].records == pytest.approx(10)


def test_what_was_counted_before_the_period_is_subtracted(records: Path) -> None:
    found = compared(records, scrape(), scrape(lambda name: 2.0))
    assert found["tokens"].prometheus == 12
    assert found["acceptance length"].agrees


@pytest.mark.parametrize(
    ("metric", "quantity"),
    [
        ("outrider_accepted_tokens_total", "acceptance length"),
        ("outrider_verifier_tokens_total", "tokens"),
        ("outrider_verifier_busy_seconds_total", "busy_s"),
        ("outrider_verifier_idle_seconds_total", "busy + idle, s"),
        ("outrider_tgs_decode_sum", "TGS decode, mean"),
    ],
)
def test_a_difference_of_three_percent_is_seen(records: Path, metric: str, quantity: str) -> None:
    found = compared(records, {}, scrape(lambda name: 1.03 if name == metric else 1.0))
    assert not found[quantity].agrees
    assert any(line.startswith(quantity) and "differs" in line for line in table(list(found.values())))


def test_what_only_one_knows_is_a_difference() -> None:
    assert not Quantity("x", 1.0, None).agrees
    assert not Quantity("x", 1.0, 0.0).agrees
    assert Quantity("x", None, None).agrees
    assert Quantity("x", 0.0, 0.0).agrees
    assert Quantity("x", 0.0002, 0.0004, is_share=True).agrees
    assert not Quantity("x", 0.02, 0.04, is_share=True).agrees


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile(0.5, [(10.0, 0), (20.0, 4), (math.inf, 4)]) == 15
    assert quantile(0.95, [(10.0, 10), (20.0, 20), (math.inf, 20)]) == 19
    assert quantile(0.5, [(10.0, 1), (math.inf, 4)]) == 10, "nothing is known of the last bucket"
    assert quantile(0.5, [(10.0, 0), (math.inf, 0)]) is None
    assert quantile(0.5, []) is None


def test_only_what_is_listed_may_be_empty() -> None:
    assert may_be_empty(Expression("OutriderQueue", "x > 0"))
    assert may_be_empty(Expression("a / b / A", "sum(ALERTS)"))
    assert not may_be_empty(Expression("recorded job:outrider_tokens:rate1m", "job:outrider_tokens:rate1m"))
    assert not may_be_empty(Expression("Outrider: overview / Queue / A", "sum(x)"))


def test_the_program_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(PrometheusError, match="set PROMETHEUS"):
        find_program()
    program = tmp_path / "prom"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    assert find_program() == str(program)
