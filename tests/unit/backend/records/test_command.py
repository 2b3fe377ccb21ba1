"""`outrider records`: sums, joins and exports of directories whose rows are known."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from backend.records.reading import Records
from backend.records.rows import DecisionRow
from backend.records.schema import ABOUT, KINDS
from backend.records.summary import Summary, summarise
from gateway.cli import main as cli
from tests.support.processes import ROOT
from tests.support.recorded import START, Rows, record, request, step, verification

REQUEST_SPEEDS = ("request, decoding", "request, end to end")


def small() -> Rows:
    """Three steps of two requests, ten milliseconds each, 5 ms of waiting before the second, a second of nothing before all."""
    return [
        step(0, 1.0, tokens=2, no_work=1000.0),
        verification(0, "a", 0, 0),
        verification(0, "b", 0, 0),
        step(1, 1.015, tokens=6, awaiting_draft=5.0),
        verification(1, "a", 4, 3),
        verification(1, "b", 4, 1, "drafter-1", ahead=True),
        step(2, 1.025, tokens=4),
        verification(2, "a", 2, 2),
        verification(2, "b", 0, 0),
        request("a", 0.9, 1.010, 1.035, 8),
        request("b", 0.8, 1.010, 1.035, 4, "abort"),
        DecisionRow(1, START + 1.01, 2, 4, 0, 500.0, 0.01, 3.5, 3.0, 0.5),
    ]


def summary(directory: Path, **selected: Any) -> Summary:
    return summarise(Records(directory, **selected).workers())


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["records", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_definitions(tmp_path: Path) -> None:
    record(tmp_path, small())
    found = summary(tmp_path)
    (worker,) = found.workers
    assert (worker.steps, found.tokens, worker.verifications, worker.batch_mean) == (3, 12, 6, 2.0)
    assert found.live.drafts == 3
    assert found.live.acceptance_length == 1 + 6 / 3
    assert (found.live.accepted, found.live.draft_tokens) == (6, 10)
    assert (found.live.drafted_by_position, found.live.accepted_by_position) == ([3, 3, 2, 2], [3, 2, 1, 0])
    assert {name: each.acceptance_length for name, each in found.by_drafter.items()} == {"drafter-0": 3.5, "drafter-1": 2}
    assert found.ahead.drafts == 1
    assert worker.idle_s == {"no_work": 1.0, "awaiting_draft": 0.005, "transfer": 0.0, "swap": 0.0}
    assert worker.busy_s == pytest.approx(0.030)
    assert worker.finished_s == pytest.approx(0.035, abs=1e-5)
    decode, end_to_end, steps = (found.summary[f"TGS of a {name}"] for name in (*REQUEST_SPEEDS, "step"))
    assert decode.median == pytest.approx(7 / 0.025, rel=1e-4), "an aborted request has no speed"
    assert end_to_end.median == pytest.approx(8 / 0.135, rel=1e-4)
    assert steps.count == 3
    assert steps.median == pytest.approx(200), "steps of 2 / 2 / 10 ms, 6 / 2 / 15 ms, 4 / 2 / 10 ms"
    assert steps.p10 == pytest.approx(120), "the second without work belongs to no step"
    assert found.finish_reasons == {"length": 1, "abort": 1}


def test_a_moved_request_is_as_fast_as_its_client_saw_it(tmp_path: Path) -> None:
    moved = msgspec.structs.replace(request("a", 0.0, 5.0, 6.0, 11), brought_tokens=49)
    record(tmp_path, [step(0, 0.0), moved])
    record(tmp_path, [step(0, 0.0), request("a", 0.0, 1.0, 4.0, 49, "abort")], "verifier-1")
    found = summary(tmp_path)
    decode, end_to_end = (found.summary[f"TGS of a {name}"] for name in REQUEST_SPEEDS)
    assert end_to_end.median == pytest.approx(60 / 6.0, rel=1e-4)
    assert decode.median == pytest.approx(10 / 1.0, rel=1e-4)
    first = found.summary["seconds to the first token"]
    assert first.count == 1
    assert first.median == pytest.approx(1.0, rel=1e-4)


def test_ratios_of_sums_over_incarnations_and_verifiers(tmp_path: Path) -> None:
    rows: Rows = [step(0, 0.0), verification(0, "a", 4, 4)]
    record(tmp_path, rows)
    record(tmp_path, [step(0, 5.0), *[verification(0, f"r{i}", 4, 0) for i in range(3)]], incarnation="bbbbbbbb")
    record(tmp_path, [*rows, verification(0, "fixed", 4, 0, teacher_forced=True)], "verifier-1")
    found = summary(tmp_path)
    assert [each.worker for each in found.workers] == ["verifier-0 (aaaa)", "verifier-0 (bbbb)", "verifier-1 (aaaa)"]
    assert (found.live.acceptance_length, found.by_drafter["drafter-0"].drafts) == (1 + 8 / 5, 5)
    assert (found.teacher_forced.drafts, found.teacher_forced.acceptance_length) == (1, 1)
    only = summary(tmp_path, verifiers=frozenset({"verifier-1"}))
    assert ([each.worker for each in only.workers], only.live.acceptance_length) == (["verifier-1"], 5)


def test_of_a_period_and_time_without_work_counts_where_it_was(tmp_path: Path) -> None:
    """Idle from 0 to 10 and from 10.01 to 30, both told by the step behind it."""
    record(tmp_path / "small", small())
    found = summary(tmp_path / "small", since=START + 1.012, until=START + 1.02)
    assert (found.workers[0].steps, found.workers[0].verifications, found.live.drafts) == (1, 2, 2)
    assert found.finish_reasons == {}
    record(tmp_path / "idle", [step(0, 10.0, no_work=10_000.0), step(1, 30.0, no_work=19_985.0, awaiting_draft=5.0)])
    for since, until, no_work, awaiting in ((0, 40, 29.985, 5), (4, 12, 7.99, 0), (25, 40, 4.995, 5), (-5, 11, 10.99, 0)):
        (worker,) = summary(tmp_path / "idle", since=START + since, until=START + until).workers
        found_s = [worker.idle_s[cause] for cause in ("no_work", "awaiting_draft")]
        assert found_s == pytest.approx([no_work, awaiting / 1000], abs=1e-5), (since, until)


def test_summary_for_a_person_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, small())
    status, text, _ = run(capsys, tmp_path, "summary")
    assert status == 0
    assert "| live | 3 | 3.00 | 0.60 | 1.00 0.67 0.50 0.00 |" in text
    assert "no_work 1.00, awaiting_draft 0.01" in text or "no_work 1.00, awaiting_draft 0.00" in text
    assert "2 requests ended (abort 1, length 1); 12 tokens in 0.0 s." in text
    status, text, _ = run(capsys, tmp_path, "summary", "--json", "--since", "2026-01-01T00:00:00")
    assert status == 0
    assert msgspec.json.decode(text, type=Summary).live.acceptance_length == 3


def test_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verification whose step or request is missing is kept."""
    record(tmp_path / "r", small())
    requests = [request("a", 8.0, 8.5, 9.0, 50), request("a", 8.0, 8.5, 9.5, 60)]
    record(tmp_path / "r", [step(0, 9.0), verification(0, "a", 4, 4), *requests], incarnation="bbbbbbbb")
    record(tmp_path / "r", [verification(5, "alone", 4, 2)], "verifier-1")
    parquet, csv_file = (tmp_path / f"joined.{kind}" for kind in ("parquet", "csv"))
    for output in (parquet, csv_file):
        status, _, err = run(capsys, tmp_path / "r", "join", "--output", output)
        assert (status, "8 rows in" in err) == (0, True)
    by_key = {(row["incarnation"], row["step"], row["request_id"]): row for row in pq.read_table(parquet).to_pylist()}
    assert len(by_key) == 8
    row = by_key["aaaaaaaa", 1, "b"]
    assert (row["verifier"], row["accepted"], row["request_tokens"]) == ("verifier-0", 1, 4)
    assert row["step_idle_awaiting_draft_ms"] == 5.0
    assert by_key["bbbbbbbb", 0, "a"]["request_tokens"] == 60, "the one that ended last; nothing of the other incarnation"
    alone = by_key["aaaaaaaa", 5, "alone"]
    assert (alone["accepted"], alone["step_busy_ms"], alone["request_tokens"]) == (2, None, None)
    with csv_file.open() as file:
        assert [(row["step"], row["request_id"]) for row in csv.DictReader(file)] == [(str(n), name) for _, n, name in by_key]


def test_join_to_standard_output_and_export_of_every_kind(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    record(tmp_path / "r", small())
    assert cli.main(["records", str(tmp_path / "r"), "join"]) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith('"verifier","incarnation","step","request_id"')
    for to, more in (("all", ["--format", "parquet"]), ("two", ["--kind", "step", "--kind", "request"])):
        assert cli.main(["records", str(tmp_path / "r"), "export", "--output", str(tmp_path / to), *more]) == 0
    assert {file.name for file in (tmp_path / "all").iterdir()} == {f"{kind}.parquet" for kind in KINDS}
    assert {file.name for file in (tmp_path / "two").iterdir()} == {"request.csv", "step.csv"}
    steps = pq.read_table(tmp_path / "all" / "step.parquet").to_pylist()
    assert [each["tokens"] for each in steps] == [2, 6, 4]
    assert steps[1]["idle_awaiting_draft_ms"] == 5.0


def foreign(directory: Path) -> None:
    (directory / "data.parquet").write_bytes(b"PAR1")


def of_version(number: int, directory: Path) -> None:
    file = record(directory, small()) / ABOUT
    file.write_text(file.read_text().replace('"version": 4', f'"version": {number}'))


def of_another_shape(directory: Path) -> None:
    records = record(directory, small())
    pq.write_table(pq.read_table(next(records.glob("request-*"))), records / "step-000099.parquet")


def damaged(by: bytes, directory: Path) -> None:
    (record(directory, small()) / ABOUT).write_bytes(by)


def nothing(directory: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "arguments", "status", "line"),
    [
        (nothing, ["summary"], 1, "holds no records: verifiers write them with --records-dir"),
        (foreign, ["summary"], 1, "holds no records"),
        (lambda d: d.rmdir(), ["summary"], 1, "no such directory"),
        (partial(of_version, 5), ["summary"], 1, "records of version 5; this release reads version 4"),
        (partial(damaged, b"{"), ["summary"], 1, "is not what a verifier writes"),
        (partial(damaged, b'{"version": "\xff"}'), ["summary"], 1, "is not what a verifier writes"),
        (of_another_shape, ["summary"], 1, "is not of version 4"),
        (nothing, ["summary", "--since", "yesterday"], 2, "'yesterday' is no time"),
        (nothing, ["summary", "--since", "5", "--until", "4"], 1, "--since must be before --until"),
        (lambda d: record(d, small()), ["summary", "--until", "2000-01-01T00+02:00"], 1, "nothing was recorded in this period"),
        (lambda d: record(d, small()), ["summary", "--verifier", "v9"], 1, "has no verifier v9; there are verifier-0"),
        (lambda d: record(d, small()), ["export"], 1, "export needs --output"),
        (lambda d: record(d, small()), ["join", "--output", "x.txt"], 1, "--format is needed"),
        (lambda d: record(d, small()), ["join", "--format", "parquet"], 1, "parquet needs a file"),
        (lambda d: record(d, small()), ["join", "--output", "/dev/null/x.csv"], 1, "/dev/null"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, arguments: list[str], status: int, line: str
) -> None:
    make(tmp_path)
    given, _, err = run(capsys, tmp_path, *arguments)
    assert given == status
    assert line in err
    assert err.count("\n") == 1


def test_an_unreadable_file_is_skipped_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = record(tmp_path, small())
    (directory / "step-000099.parquet").write_bytes(b"PAR1 and nothing more")
    for place in (tmp_path, directory):
        assert summary(place).workers[0].steps == 3
    assert "step-000099.parquet cannot be read and was skipped" in caplog.text


def test_the_documentation_names_every_column() -> None:
    page = (ROOT / "docs" / "reference" / "records.md").read_text()
    for kind, row in KINDS.items():
        section = page.partition(f"| `{kind}` |")[2].partition("\n\n")[0]
        assert section, kind
        for field in msgspec.structs.fields(row):
            assert f"`{field.name}`" in section, f"{kind}.{field.name}"
