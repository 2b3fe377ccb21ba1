"""From counters to rows, the comparison of greedy answers, and what is written."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from backend.engine.client import Answer
from backend.fleet import DraftCounters, DrafterStats, VerifierStats
from backend.lab.bench import options as options_module
from backend.lab.bench import tables as report
from backend.lab.bench.load import MeasuredLoad
from backend.lab.bench.measure import Measurement, Results, Row, Snapshot, ratios, sample
from backend.lab.bench.pace import Paced
from backend.lab.bench.plan import Configuration, CoreSplit, Point

OFF = Configuration("off", 0)
SYNC = Configuration("sync", 4)
POINT = Point(1, 0.0)
SPLIT = CoreSplit((0,), (1,))


def stats(busy_s: float, idle_s: float, awaiting_s: float, steps: int, counters: DraftCounters) -> VerifierStats:
    idle = {"no_work": idle_s, "awaiting_draft": awaiting_s}
    made = VerifierStats("v", 0.0, "sync", 4, busy_s=busy_s, idle_s=idle, steps=steps, drafters={"d": counters})
    made.verify_s, made.verifications = busy_s / 2, 2 * steps
    return made


def measured(configuration: Configuration = SYNC, number: int = 0, paced: bool = False) -> Measurement:
    first = DraftCounters(drafts=5, draft_tokens=10, accepted_tokens=5)
    before = Snapshot(stats(1.0, 5.0, 0.5, 10, first), DrafterStats("d", 0, busy_s=1))
    counters = DraftCounters(15, 40, 25, rounds=20, draft_s=0.04)
    after = Snapshot(stats(3.0, 6.0, 1.5, 30, counters), DrafterStats("d", 0, busy_s=1.5))
    answers = [Answer(tokens=[1] * 11, sent_at=10.0, first_at=10.5, last_at=12.5)]
    rate = sum(len(answer.tokens) for answer in answers) / 2.5
    if paced:
        # 20 steps; each took 150 ms, of which 90 the device's own, 5 in excess of it and 50 waiting for drafts.
        before = replace(before, steps=Paced(5, 1.0, 1, 0.5), passes=Paced(10, 1.0))
        after = replace(after, steps=Paced(25, 2.8, 6, 0.6), passes=Paced(50, 2.0, 4, 0.2))
    return sample(number, configuration, MeasuredLoad(2.5, answers, rate), before, after, SPLIT)


def test_a_sample_divides_differences() -> None:
    """Here is what the tables below do not show."""
    found = measured()
    assert found.tokens_per_s == pytest.approx(11 / 2.5)
    assert found.busy_core_s == pytest.approx(2.0 + 0.5)
    assert "no_work" not in found.idle


def test_a_row_holds_medians_and_ratios_are_by_round() -> None:
    def rounds(configuration: Configuration, speeds: list[float]):
        each = [msgspec.structs.replace(measured(configuration, i), tokens_per_s=s) for i, s in enumerate(speeds)]
        return Row("demo", configuration, POINT, each)

    plain, fast = rounds(OFF, [10, 20, 40]), rounds(SYNC, [20, 30, 80])
    assert (plain.median("tokens_per_s"), plain.median("hit_rate")) == (20, None)
    found = plain.document(1)
    assert (found["mode"], found["k"], found["concurrency"]) == ("off", 0, 1)
    assert [each["tokens_per_s"] for each in found["rounds"]] == [10, 20, 40]
    assert ratios(fast, plain) == [2.0, 1.5, 2.0]
    assert ratios(fast, None) == []


@pytest.fixture
def results() -> Results:
    results = Results(ABOUT, options_module.parse([]), SPLIT, complete=True)
    results.targets["demo"] = {"model": "demo", "parameters": 4_200_000}
    for configuration in (OFF, SYNC):
        results.samples["demo", configuration, POINT] = [measured(configuration, i) for i in range(3)]
    results.greedy["demo", POINT, 0] = {OFF: [[1, 2]], SYNC: [[1, 2]]}
    return results


ABOUT = {
    "commit": "abc",
    "hardware": {"cpu": "x", "gpus": [], "memory_gib": 1, "load_average_before": 0, "python": "3", "versions": {}},
    "command": "outrider bench",
    "date": "2000-01-01T00:00:00Z",
}


def written(directory: Path, results: Results, *arguments: str) -> str:
    """The text of the results."""
    report.write(directory, replace(results, options=options_module.parse(arguments)), lambda _: None)
    return (directory / "bench.md").read_text()


def test_all_three_files_are_written(tmp_path: Path, results: Results) -> None:
    pytest.importorskip("matplotlib")
    results.greedy["demo", POINT, 1] = {SYNC: [[1, 3]], OFF: [[1, 2]]}
    text = written(tmp_path, results)
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["greedy_identical"] is False
    assert [(r["mode"], len(r["rounds"])) for r in content["rows"]] == [("off", 3), ("sync", 3)]
    assert "| code c1 t0 | sync-k4 | 5 | 500 | 3.00 | 25% | 40.0% | - | 2.00 | 50.00 |" in text
    assert "- target demo, sync-k4, code c1 t0, round 1, request 0: token 1 is 3, with off 2" in text
    assert "2 greedy answers compared with plain decoding's: 1 measurements differ" in text
    assert "What a step is made of" not in text, "it was not paced"
    assert "- Before: 3 loads of up to 64 tokens per concurrency and temperature, 4 times as many for `auto`" in text
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_every_table_of_a_paced_run_says_so_with_the_numbers(tmp_path: Path, results: Results) -> None:
    results.samples["demo", SYNC, POINT] = [measured(SYNC, i, paced=True) for i in range(3)]
    text = written(tmp_path, results, "--pace", "6,32,0.5,1")
    said = "`6,32,0.5,1`: target step 6 ms + 32 us per token; draft pass 0.5 ms + 1 us per token, in `native` 0.5 ms"
    assert text.count("### ") == text.count(said) == 3
    assert "| code c1 t0 | sync-k4 | 150.00 | 90.00 | 5.00 | 50.00 | 5.00 | 25% | 10% | 5.000 |" in text
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["settings"]["pace"]["target"] == {"fixed_ms": 6, "token_us": 32}
    assert "Paced on" not in written(tmp_path, results)


def test_rows_are_compared_with_the_faster_native_variant(tmp_path: Path, results: Results) -> None:
    for mode, speed in (("native", 8.8), ("native-probabilistic", 2.2)):
        each = [msgspec.structs.replace(measured(SYNC, i), tokens_per_s=speed) for i in range(3)]
        results.samples["demo", Configuration(mode, 4), POINT] = each
    lines = written(tmp_path, results).splitlines()
    assert "| code c1 t0 | sync-k4 | 4 | 1.00 | 0.50 | 0.80 |" in lines
    assert "| code c1 t0 | native-probabilistic-k4 | 2 | 0.50 | 0.25 | 0.80 |" in lines


def test_what_an_unfinished_run_leaves_says_so(tmp_path: Path, results: Results) -> None:
    for _ in range(2):
        report.keep(tmp_path, replace(results, complete=False))
    (left,) = tmp_path.iterdir()
    content = json.loads(left.read_text())
    assert (left.name, content["complete"], len(content["rows"])) == ("bench.json", False, 2)
