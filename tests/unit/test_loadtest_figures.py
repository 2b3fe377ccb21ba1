"""Figures, objectives and comparisons of load tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import slo
from loadtest.figures import by_label, compare, drift, percentile, reasons, summarize
from loadtest.plan import read_answers, write_answers
from loadtest.report import Result, evaluate, text, write
from loadtest.run import add_trouble
from loadtest.timing import Answer, Outcome
from loadtest.watch import COLUMNS, figures, read


def answer(
    user: int = 0, number: int = 0, start: float = 0.0, tgs: float = 10.0, outcome: Outcome = "ok", **more: object
) -> Answer:
    """11 tokens, the first after 0.1 s, the rest at `tgs`."""
    last = start + 0.1 + 10 / tgs
    made = Answer(
        "label", user, number, start, outcome, ended=last, chunks=[start + 0.1, last], tokens=11, finish_reason="stop"
    )
    for name, value in more.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from(slo.PERCENTILES))
def test_a_percentile_is_a_sample_that_enough_are_not_above(values: list[float], percent: int) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values)
    assert sum(value < found for value in values) < percent / 100 * len(values)


def test_only_whole_answers_are_timed_and_all_are_counted() -> None:
    answers = [
        answer(start=0.0),
        answer(start=1.0, tgs=20.0),
        answer(outcome="aborted", tgs=1000.0),
        answer(outcome="rejected", reason="429"),
        answer(outcome="failed", reason="no [DONE]"),
    ]
    found = summarize(answers)
    assert (found["requests"], found["aborted"], found["rejected"], found["failures"]) == (2, 1, 1, 1)
    assert found["tgs_p50"] == pytest.approx(10.0)
    assert found["tgs_p99"] == pytest.approx(20.0)
    assert found["ttft_p95_ms"] == pytest.approx(100.0)
    assert found["tokens_per_s"] == pytest.approx(22 / 1.6)
    assert reasons(answers) == {"no [DONE]": 1}
    assert summarize([])["ttft_p50_ms"] is None


def test_labels_apart() -> None:
    found = by_label([answer(), answer(tgs=40.0, label="fast")])
    assert (found["label"]["tgs_p50"], found["fast"]["tgs_p50"]) == pytest.approx((10.0, 40.0))


def test_drift_sees_a_server_that_becomes_slower() -> None:
    steady = [answer(number=n, start=float(n)) for n in range(12)]
    slower = [answer(number=n, start=float(n), tgs=10.0 if n < 6 else 5.0) for n in range(12)]
    assert drift(steady) == pytest.approx(1.0)
    assert drift(slower) == pytest.approx(0.5)
    assert drift(steady[:3]) is None


def test_pairs_are_the_same_request_in_both_runs() -> None:
    base = [answer(user, number, tgs=10.0, text="a") for user in range(3) for number in range(4)]
    other = [answer(user, number, tgs=15.0, text="a" if user else "b") for user in range(3) for number in range(6)]
    other[0].outcome = "failed"
    found = compare(base, other)
    assert found["pairs"] == 11
    assert found["speedup_p50"] == pytest.approx(1.5)
    assert found["identical"] == pytest.approx(8 / 11)
    with pytest.raises(ValueError, match="no request in common"):
        compare(base, [])


def test_objectives_are_read_and_checked() -> None:
    assert slo.parse("ttft_p95_ms=2000, failures=0,tgs_p50=20") == {"ttft_p95_ms": 2000, "failures": 0, "tgs_p50": 20}
    for wrong, hint in (("ttft_p95=1", "did you mean ttft_p95_ms"), ("failures", "name=limit"), ("failures=x", "not a number")):
        with pytest.raises(slo.SloError, match=hint):
            slo.parse(wrong)
    assert set(slo.DEFAULT) <= set(slo.names())


def test_a_limit_is_kept_at_its_very_value_and_missed_without_one() -> None:
    limits = {"ttft_p95_ms": 100.0, "tgs_p50": 20.0, "failures": 0.0, "acceptance_length": 2.0}
    assert slo.misses(limits, {"ttft_p95_ms": 100.0, "tgs_p50": 20.0, "failures": 0.0, "acceptance_length": 2.0}) == []
    missed = slo.misses(limits, {"ttft_p95_ms": 101.0, "tgs_p50": 19.0, "failures": 1.0, "acceptance_length": None})
    assert [miss.name for miss in missed] == list(limits)
    assert "nothing was measured" in str(missed[-1])


METRICS = """# HELP x y
vllm:spec_decode_num_drafts_total {drafts}
vllm:spec_decode_num_accepted_tokens_total {accepted}
outrider_verifier_busy_seconds_total{{verifier="a"}} 2.0
outrider_verifier_busy_seconds_total{{verifier="b"}} 1.0
outrider_verifier_idle_seconds_total{{cause="awaiting_draft",verifier="a"}} {waited}
outrider_verifier_idle_seconds_total{{cause="no_work",verifier="a"}} 4.0
outrider_requests_in_flight 3.0
"""


def test_the_servers_own_figures() -> None:
    before = read(METRICS.format(drafts=10, accepted=5, waited=0.5))
    after = read(METRICS.format(drafts=110, accepted=155, waited=1.5))
    assert set(before) == set(COLUMNS)
    assert (before["busy_s"], before["awaiting_draft_s"], before["no_work_s"], before["in_flight"]) == (3.0, 0.5, 4.0, 3.0)
    found = figures([before, after])
    assert found["acceptance_length"] == pytest.approx(2.5)
    assert found["awaiting_draft_share"] == pytest.approx(1.0)
    assert figures([before]) == {}


def test_a_report_says_what_was_missed_and_reads_back(tmp_path: Path) -> None:
    answers = [answer(number=n, start=float(n)) for n in range(8)] + [answer(outcome="failed", reason="no [DONE]")]
    result = evaluate("chat", "python -m loadtest", answers, {"leftover": 0}, {"lag_p99_ms": 1.5})
    result.slo = {"failures": 0, "tgs_p50": 5}
    result.missed = slo.misses(result.slo, result.figures)
    write(result, answers, tmp_path)
    shown = text(result)
    assert "chat: MISSED" in shown
    assert "failure: no [DONE] (1x)" in shown
    assert "missed: failures: 1 is above the limit of 0" in shown
    assert len((tmp_path / "requests.csv").read_text().splitlines()) == 10
    write_answers(tmp_path / "answers.jsonl", answers)
    assert read_answers(tmp_path / "answers.jsonl") == answers


def test_trouble_of_the_baseline_is_not_forgotten():
    def result(**figures):
        return Result("compare", "", figures, {}, {"no [DONE]": 1}, {})

    run, base = result(failures=1.0, rejected=0.0, leftover=0.0), result(failures=1.0, rejected=2.0, leftover=3.0)
    add_trouble(run, base)
    assert run.figures == {"failures": 2, "rejected": 2, "leftover": 3}
    assert run.failures == {"no [DONE]": 1, "without speculation: no [DONE]": 1}
    assert [miss.name for miss in slo.misses(slo.DEFAULT, run.figures)][:3] == ["failures", "rejected", "leftover"]
