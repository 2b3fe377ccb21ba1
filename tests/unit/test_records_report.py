"""`outrider report`: what it gathers from records and from a rollout's tables, and the page it makes of it."""

from __future__ import annotations

import builtins
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from backend.records.chapters import TEACHER_FORCED, Chapter, recorded, rolled_out, rounds
from backend.records.plots import PLOTS
from backend.records.reading import Records, RecordsError
from backend.records.summary import by_drafter
from gateway import cli
from tests.support.recorded import Rows, record, request, step, verification

PERF = "step_tgs,step_tokens,cur_acc_len,step_batchsize,step_ts,step_interval,draft_nstep,draft_time,verify_time,idle_time"
REQUEST = (
    "req_id,rollout_time,rollout_step,prompt_length,response_length,spec_accept_rate,spec_matched_total,"
    "spec_draft_total,spec_accepted_total"
)
MARKOV = "acc_token_num,draft_token_num,verify_token_num,cur_step,req_id"


def worker(began: float, ended: float, drafter: str = "drafter-0") -> Rows:
    """Steps of ten milliseconds at both ends of a stretch, one request over both."""
    return [
        step(0, began, requests=1, tokens=1, no_work=1000 * began),
        verification(0, "a", 0, 0),
        step(1, ended - 0.01, requests=1, tokens=5, awaiting_draft=5.0),
        verification(1, "a", 4, 4, drafter),
        request("a", began, began + 0.01, ended, 6),
    ]


def rollout(directory: Path, step_number: int = 0, number: int = 0, workers: int = 2) -> Path:
    """A round as `outrider rollout` leaves it: worker 1 takes 100 ms longer."""
    where = directory / f"step{step_number}" / f"round{number}"
    where.mkdir(parents=True)
    for n in range(workers):
        perf = [
            "100.0,2,0.0,2,0.000,0.000,4,0.000,9.000,0.000",
            "150.0,6,3.0,2,0.010,10.000,4,2.000,8.000,1.000",
            f"90.0,3,3.0,1,{0.020 + 0.1 * n:.3f},10.000,4,2.000,8.000,1.000",
        ]
        requests = ["1,30.0,3,10,7,0.750,6,8,7", "2,30.0,2,10,4,0.500,2,4,4"]
        markov = ["1,0,1,0,1", "4,4,5,1,1", "3,4,5,2,1", "1,0,1,0,2", "3,4,5,1,2"]
        for name, head, rows in (("perf", PERF, perf), ("request", REQUEST, requests), ("markov", MARKOV, markov)):
            (where / f"worker_{n}_{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    return where


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["report", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def chapter(directory: Path) -> Chapter:
    (found,) = recorded(Records(directory))
    return found


def test_who_ran_alone_and_for_how_long(tmp_path: Path) -> None:
    for place, (began, ended) in enumerate([(0.0, 2.0), (0.5, 3.5), (0.0, 3.0)]):
        record(tmp_path, worker(began, ended), f"verifier-{place}")
    found = chapter(tmp_path)
    assert [each.ended_s for each in found.workers] == pytest.approx([2.0, 3.5, 3.0], abs=1e-5)
    assert found.workers[1].began_s == pytest.approx(0.5, abs=1e-5)
    assert list(found.alone_s().values()) == pytest.approx([0, 0.5, 0], abs=1e-5)


def test_one_worker_runs_alone_with_nobody(tmp_path: Path) -> None:
    record(tmp_path, worker(0.0, 1.0))
    assert chapter(tmp_path).alone_s() == {"verifier-0": 0.0}


def test_transitions_are_between_drafted_neighbours_of_one_request(tmp_path: Path) -> None:
    kept = [("a", 0, 4, 1), ("b", 0, 4, 3), ("a", 1, 4, 2), ("b", 1, 0, 0), ("a", 2, 4, 1), ("b", 2, 4, 4), ("b", 3, 4, 4)]
    record(tmp_path, [step(0, 0.0), *[verification(n, name, drafted, accepted) for name, n, drafted, accepted in kept]])
    assert chapter(tmp_path).transitions() == Counter({(1, 2): 1, (2, 1): 1, (4, 4): 1})


def test_an_incarnation_does_not_go_on_with_anothers_requests(tmp_path: Path) -> None:
    for incarnation in ("aaaaaaaa", "bbbbbbbb"):
        record(tmp_path, [step(0, 0.0), verification(0, "a", 4, 2)], incarnation=incarnation)
    found = chapter(tmp_path)
    assert not found.transitions()
    assert [each.name for each in found.workers] == ["verifier-0 (aaaa)", "verifier-0 (bbbb)"]


def test_live_and_fixed_responses_are_kept_apart(tmp_path: Path) -> None:
    forced = [verification(0, "a", 4, 4, teacher_forced=True)]
    record(tmp_path / "mixed", [step(0, 0.0), *forced, verification(0, "b", 4, 0)])
    mixed = chapter(tmp_path / "mixed")
    assert by_drafter(mixed.outcomes)["drafter-0"].acceptance_length == 1
    assert "1 verifications of fixed responses are left out" in mixed.notes[0]
    record(tmp_path / "fixed", [step(0, 0.0), *forced])
    assert chapter(tmp_path / "fixed").is_teacher_forced


def test_a_rollouts_tables(tmp_path: Path) -> None:
    where = rollout(tmp_path)
    (found,) = rolled_out(tmp_path)
    assert found.title == "step0, round0"
    first, second = found.workers
    assert (first.ended_s, second.ended_s) == pytest.approx((0.030, 0.130))
    assert found.alone_s()["worker 1"] == pytest.approx(0.1)
    assert first.idle_s == {"any cause": pytest.approx(0.002)}
    drafted = by_drafter(found.outcomes)["all drafters"]
    assert drafted.acceptance_length == 1 + (3 + 3 + 2) / 3, "the last verification was cut by one"
    assert found.transitions() == Counter({(3, 3): 2})
    assert "Each worker's clock" in found.notes[0]
    told = {
        "acceptance_is": "teacher_forced",
        "workers": [{"worker": 0, "finished_s": 5.0, "idle_s": {"awaiting_draft": 0.7}, "busy_s": 1.5}, {"worker": 1}],
    }
    (where / "report.json").write_text(json.dumps(told))
    (found,) = rolled_out(where)
    assert found.notes == [TEACHER_FORCED]
    assert (found.workers[0].began_s, found.workers[0].ended_s) == pytest.approx((4.97, 5.0))
    assert found.workers[0].idle_s == {"awaiting_draft": 0.7}


def test_rounds_are_found_from_above_and_in_order(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        rollout(tmp_path, 0, number)
    rollout(tmp_path, 3, 0)
    assert [f"{each.parent.name}/{each.name}" for each in rounds(tmp_path)] == [
        "step0/round1",
        "step0/round2",
        "step0/round10",
        "step3/round0",
    ]
    assert len(rounds(tmp_path / "step0")) == 3
    assert rounds(tmp_path / "step3" / "round0") == [tmp_path / "step3" / "round0"]


class Images(HTMLParser):
    """The sources of a page's images, and everything that a page would fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "img":
            self.images.append(found["src"] or "")
            assert found["alt"]
        elif tag not in ("meta",):
            self.open.append(tag)
        self.fetched += [found[name] or "" for name in ("src", "href") if found.get(name)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_of_records_needs_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*worker(0.0, 2.0, "<drafter>"), verification(2, "a", 4, 1, "drafter-1")]
    record(tmp_path, rows)
    record(tmp_path, worker(0.5, 3.0), "verifier-1")
    status, out, _ = report(capsys, tmp_path)
    assert status == 0
    page = (tmp_path / "report" / "report.html").read_text()
    parsed = Images(page)
    assert len(parsed.images) == len(PLOTS)
    assert all(each.startswith("data:image/png;base64,") for each in parsed.fetched)
    assert not re.search(r"https?://|@import|url\(", page)
    assert parsed.open == []
    assert sorted(file.name for file in (tmp_path / "report").iterdir()) == sorted(
        ["report.html", *(f"{name}.png" for name in PLOTS)]
    )
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (tmp_path / "report").glob("*.png"))
    assert "acceptance length 4.00 over 3 drafts" in page
    assert "report.html" in out


def test_the_page_of_a_rollout_has_a_chapter_per_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(tmp_path, 0, 0)
    rollout(tmp_path, 0, 1)
    status, _, _ = report(capsys, tmp_path, "--output", tmp_path / "out")
    assert status == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<h2>") == 2
    assert (tmp_path / "out" / "step0-round1-markov.png").exists()


def test_what_cannot_be_drawn_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, [step(0, 0.0, requests=0, tokens=0)])
    assert report(capsys, tmp_path)[0] == 0
    drawn = {file.stem for file in (tmp_path / "report").glob("*.png")}
    assert drawn == {"load", "idle", "stragglers"}


def test_many_workers_and_drafters_are_drawn_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in range(11):
        record(tmp_path, worker(0.0, 1.0 + place / 10, f"drafter-{place}"), f"verifier-{place}")
    assert report(capsys, tmp_path)[0] == 0


def missing_table(directory: Path) -> None:
    (rollout(directory) / "worker_1_markov.csv").unlink()


def missing_column(directory: Path) -> None:
    file = rollout(directory) / "worker_1_perf.csv"
    file.write_text(file.read_text().replace("idle_time", "idle"))


def text_for_numbers(directory: Path) -> None:
    file = rollout(directory) / "worker_0_request.csv"
    file.write_text(file.read_text().replace(",7,0.750", ",seven,0.750"))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda directory: None, "holds neither records (--records-dir) nor the tables of a rollout"),
        (missing_table, "worker_1_markov.csv is missing"),
        (missing_column, "worker_1_perf.csv cannot be read: Column 'idle_time' in include_columns does not exist"),
        (text_for_numbers, "worker_0_request.csv cannot be read: In CSV column #4: CSV conversion error to int64: invalid"),
        (lambda directory: (rollout(directory) / "report.json").write_text("{"), "report.json cannot be read"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, line: str) -> None:
    make(tmp_path)
    status, _, err = report(capsys, tmp_path)
    assert status == 1
    assert line in err
    assert err.count("\n") == 1


def test_nothing_in_the_period(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, worker(0.0, 1.0))
    status, _, err = report(capsys, tmp_path, "--until", "5")
    assert status == 1
    assert "nothing was recorded in this period" in err
    with pytest.raises(RecordsError):
        recorded(Records(tmp_path / "nowhere"))


def test_a_period_of_a_rollout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout(tmp_path)
    status, _, err = report(capsys, tmp_path, "--since", "5")
    assert status == 1
    assert "this is a rollout" in err


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, worker(0.0, 1.0))
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    status, _, err = report(capsys, tmp_path)
    assert status == 1
    assert "pip install matplotlib" in err
    assert not (tmp_path / "report").exists()
