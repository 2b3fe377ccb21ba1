"""`outrider records DIR report`: what its plots show, of records and of a round of a rollout."""

import sys
from pathlib import Path

import pytest

from backend.config import Settings
from backend.records.kept import RowBatch
from backend.records.plots import PLOTS
from backend.records.reading import Records
from backend.records.summary import summarise
from backend.rollout.outcome import RoundResult, WorkerShare
from backend.rollout.results import write_round
from gateway.cli import main as cli
from tests.support.recorded import Rows, record, request, step, verification


def worker(began: float, ended: float, drafter: str = "drafter-0") -> Rows:
    """Steps of ten milliseconds at both ends of a stretch, one request over both."""
    return [
        step(0, began, requests=1, tokens=1, no_work=1000 * began),
        verification(0, "a", 0, 0),
        step(1, ended - 0.01, requests=1, tokens=5, awaiting_draft=5.0),
        verification(1, "a", 4, 4, drafter),
        request("a", began, began + 0.01, ended, 6),
    ]


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Status and remarks."""
    status = cli.main(["records", *map(str, arguments)])
    return status, capsys.readouterr().err


def test_the_report_shows_every_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, [*worker(0.0, 2.0), verification(2, "a", 4, 1, "drafter-1")])
    for place in range(1, 11):  # more than there are colours
        record(tmp_path, worker(0.5, 3.0, f"drafter-{place}"), f"verifier-{place}")
    status, err = report(capsys, tmp_path, "report")
    assert status == 0
    assert "report.md, with its plots" in err
    text = (tmp_path / "report" / "report.md").read_text()
    for name in PLOTS:
        assert f"]({name}.png)" in text
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "**teacher-forced**" not in text
    assert "| live | 12 | 4.75 |" in text


def test_a_round_of_a_rollout_is_read_like_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verifications = [verification(0, "1", 4, 4, teacher_forced=True)]
    rows, requests = RowBatch([step(0, 0.0)], verifications), [request("1", 0.0, 0.1, 0.2, 5)]
    finished = RoundResult(0, parts=[WorkerShare(number, rows, requests) for number in range(2)])
    for _ in range(2):  # The second time replaces the first.
        write_round(tmp_path / "round0", finished, {"fixed_responses": True}, "", Settings())
    found = summarise(Records(tmp_path / "round0").workers())
    assert [each.worker for each in found.workers] == ["verifier-0", "verifier-1"]
    assert (found.requests, found.tokens, found.teacher_forced.drafts) == (2, 10, 2)
    assert report(capsys, tmp_path / "round0", "join", "--output", tmp_path / "joined.csv")[0] == 0
    assert report(capsys, tmp_path / "round0", "report")[0] == 0
    assert "**teacher-forced**" in (tmp_path / "round0" / "report" / "report.md").read_text()


def test_what_cannot_be_drawn_is_left_out_and_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, [step(0, 0.0, requests=0, tokens=0)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, err = report(capsys, tmp_path, "report")
    assert (status, "pip install matplotlib" in err) == (1, True)
    assert not (tmp_path / "report").exists()
    monkeypatch.undo()
    assert report(capsys, tmp_path, "report")[0] == 0
    assert {file.stem for file in (tmp_path / "report").glob("*.png")} == {"load", "idle", "stragglers"}
