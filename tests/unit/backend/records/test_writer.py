"""Rows to files: rotated, bounded, never half a file, and never a word to the engine thread when the disk fails."""

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend.config import RecordsSettings
from backend.records import store as store_module
from backend.records import writer as writer_module
from backend.records.rows import DecisionRow, RequestRow, StepRow, VerificationRow
from backend.records.schema import ABOUT, ABOUT_KEY, KINDS, SCHEMAS, VERSION_KEY, About, Books
from backend.records.store import RecordStore
from backend.records.writer import FileRecorder

ABOUT_V0 = About("verifier-0", "0123456789abcdef", 1_700_000_000.0, "sync", "demo", 4)
STEP = StepRow(3, 1.5, 2.0, 2, 0, 5, 2, 5, 4, 0, 0.5, 1.0, 1.25, {"awaiting_draft": 0.75})
REQUEST = RequestRow("r", 1.0, 2.0, 3.0, 7, 9, 4, 12, 5, "stop", False)
DECISION = DecisionRow(3, 1.0, 2, 4, 0, 100.0, 0.01, 3.5, 2.5, 0.5)


def verification(step: int) -> VerificationRow:
    return VerificationRow(step, f"request-{step}", 10 + step, 4, 2, 3, "drafter-0", False, False)


def settings(directory: Path, **given: Any) -> RecordsSettings:
    return RecordsSettings(dir=str(directory), **given)


def make_store(directory: Path, about: About = ABOUT_V0, **given: Any) -> RecordStore:
    return RecordStore(about, settings(directory, **given))


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is due at once."""
    monkeypatch.setattr(store_module, "ROTATE_BYTES", 1)


def files(directory: Path, kind: str = "*") -> list[Path]:
    return sorted(directory.rglob(f"{kind}-*.parquet"))


def books(store: RecordStore) -> Books:
    return msgspec.json.decode((store.directory / ABOUT).read_bytes(), type=Books)


@pytest.mark.parametrize("row", [STEP, verification(1), REQUEST, DECISION], ids=lambda row: type(row).__name__)
def test_rows_survive_the_file_which_says_whose_it_is(tmp_path: Path, row: Any) -> None:
    store = make_store(tmp_path)
    kind = next(kind for kind, of in KINDS.items() if isinstance(row, of))
    store.add([row], 0.0)
    store.close()
    (file,) = files(tmp_path)
    table = pq.read_table(file)
    assert table.schema.equals(SCHEMAS[kind])
    (read,) = table.to_pylist()
    expected = msgspec.to_builtins(row)
    if kind == "step":
        expected["idle_ms"] = {"no_work": 0.0, "awaiting_draft": 0.75, "transfer": 0.0, "swap": 0.0}
    assert read == expected
    assert file.parent.parent.name == "verifier-0"
    metadata = pq.read_metadata(file).metadata
    assert metadata[VERSION_KEY] == b"4"
    assert msgspec.json.decode(metadata[ABOUT_KEY], type=About) == ABOUT_V0
    assert (books(store).about, books(store).ended) == (ABOUT_V0, True)
    assert books(store).written == {**dict.fromkeys(KINDS, 0), kind: 1}


@pytest.mark.parametrize(("rows", "now"), [(1, 30.0), (20_000, 0.0)], ids=["age", "size"])
def test_files_are_due_by_age_or_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, now: float) -> None:
    monkeypatch.setattr(store_module, "ROTATE_BYTES", 2**20)
    store = make_store(tmp_path)
    store.add([verification(1), STEP], 0.0)
    store.rotate(0.0)
    assert files(tmp_path) == []
    store.add([verification(step) for step in range(rows)], 0.0)
    store.rotate(now)
    assert [pq.read_metadata(file).num_rows for file in files(tmp_path, "verification")] == [rows + 1]
    assert len(files(tmp_path, "step")) == 1
    store.rotate(1e9)
    assert len(files(tmp_path)) == 2, "nothing new, no new file"


def test_readers_never_see_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    write = pq.write_table
    seen: list[list[Path]] = []

    def watched(table: pa.Table, where: Path, **options: Any) -> None:
        write(table, where, **options)
        seen.append(files(tmp_path))

    monkeypatch.setattr(pq, "write_table", watched)
    store.add([STEP], 0.0)
    store.close()
    assert seen == [[]]
    assert len(files(tmp_path)) == 1


@pytest.mark.usefixtures("row_by_row")
def test_a_full_disk_costs_records_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(tmp_path)
    caplog.set_level("INFO")

    def full(table: pa.Table, where: Path, **options: Any) -> None:
        Path(where).write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        for step in range(3):
            store.add([verification(step)], 0.0)
            store.rotate(0.0)
    assert store.dropped()["verification"] == 3
    assert list(store.directory.iterdir()) == [store.directory / ABOUT]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    store.add([verification(9)], 0.0)
    store.close()
    assert (store.written["verification"], store.dropped()["verification"]) == (1, 3)
    assert books(store).dropped["verification"] == 3
    assert caplog.records[-1].message == "records are written again"


def test_a_directory_that_cannot_be_made_costs_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = make_store(tmp_path / "file" / "records")
    store.add([STEP], 0.0)
    store.close()
    assert store.dropped()["step"] == 1
    assert "cannot be written" in caplog.text


@pytest.mark.usefixtures("row_by_row")
def test_the_oldest_files_go_first_and_only_our_own(tmp_path: Path) -> None:
    old = make_store(tmp_path, About("verifier-0", "aaaaaaaa", 1.0, "off", "demo", 0))
    old.add([verification(step) for step in range(20_000)], 0.0)
    old.close()
    kept = make_store(tmp_path, About("verifier-0", "bbbbbbbb", 2.0, "off", "demo", 0))
    kept.add([STEP], 0.0)
    kept.close()
    precious = [old.directory.parent / "notes.txt", kept.directory / "notes.txt", kept.directory / "my-step-000001.parquet"]
    for file in precious:
        file.write_text("keep")
    store = make_store(tmp_path, max_mib=1)
    for start in range(40):
        rows = [VerificationRow(n, os.urandom(50).hex(), n, 4, 2, 3, "d", False, False) for n in range(start, start + 1000)]
        store.add(rows, 0.0)
        store.rotate(0.0)
    left = [file for file in files(tmp_path) if file not in precious]
    assert sum(file.stat().st_size for file in left) <= 2**20
    assert not old.directory.exists()
    assert all(file.exists() for file in precious)
    assert [int(file.stem.partition("-")[2]) for file in left] == list(range(41 - len(left), 41)), "the newest are left"
    assert books(store).removed["verification"] == 1000 * (40 - len(left))
    assert books(kept).removed["step"] == 1


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_ROWS", 2)
    recorder = FileRecorder(ABOUT_V0, settings(tmp_path))
    for step in range(5):
        recorder.put(verification(step))
    recorder.put(REQUEST)
    assert recorder.counts()[1] == {"step": 0, "verification": 3, "request": 1, "decision": 0}
    recorder.start()
    recorder.close()
    assert recorder.counts()[0]["verification"] == 2
    (directory,) = tmp_path.glob("*/*")
    assert msgspec.json.decode((directory / ABOUT).read_bytes(), type=Books).dropped["verification"] == 3


def test_what_is_queued_is_written_at_the_end(tmp_path: Path) -> None:
    recorder = FileRecorder(ABOUT_V0, settings(tmp_path))
    recorder.start()
    for step in range(10_000):
        recorder.put(verification(step))
    recorder.put(STEP)
    recorder.put(DECISION)
    recorder.close()
    tables = [pq.read_table(file) for file in files(tmp_path, "verification")]
    assert pa.concat_tables(tables)["step"].to_pylist() == list(range(10_000))
    assert len(files(tmp_path, "step")) == len(files(tmp_path, "decision")) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "records"]


def test_a_row_that_is_none_costs_no_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FileRecorder(ABOUT_V0, settings(tmp_path))
    recorder.put(VerificationRow("x", *[None] * 8))  # type: ignore[arg-type]
    recorder.put(REQUEST)
    recorder.start()
    recorder.close()
    assert "of no use" in caplog.text
    assert recorder.counts() == ({**dict.fromkeys(KINDS, 0), "request": 1}, {**dict.fromkeys(KINDS, 0), "verification": 1})
