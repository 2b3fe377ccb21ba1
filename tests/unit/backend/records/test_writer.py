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


def make_store(directory: Path, about: About = ABOUT_V0, **given: Any) -> RecordStore:
    return RecordStore(about, RecordsSettings(dir=str(directory), **given))


def files(directory: Path, kind: str = "*") -> list[Path]:
    return sorted(directory.rglob(f"{kind}-*.parquet"))


def books(store: RecordStore) -> Books:
    return msgspec.json.decode((store.directory / ABOUT).read_bytes(), type=Books)


def test_rows_survive_the_file_which_says_whose_it_is(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"step": STEP, "verification": verification(1), "request": REQUEST, "decision": DECISION}
    store = make_store(tmp_path)
    store.add([*rows.values()], 0.0)
    store.close()
    every_cause = {"no_work": 0.0, "awaiting_draft": 0.75, "transfer": 0.0, "swap": 0.0}
    for kind in KINDS:
        (file,) = files(tmp_path, kind)
        table = pq.read_table(file)
        assert table.schema.equals(SCHEMAS[kind])
        assert table.to_pylist() == [msgspec.to_builtins(rows[kind]) | ({"idle_ms": every_cause} if kind == "step" else {})]
        assert file.parent.parent.name == "verifier-0"
        metadata = pq.read_metadata(file).metadata
        assert metadata[VERSION_KEY] == b"4"
        assert msgspec.json.decode(metadata[ABOUT_KEY], type=About) == ABOUT_V0
    assert (books(store).about, books(store).ended, books(store).written) == (ABOUT_V0, True, dict.fromkeys(KINDS, 1))


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


def test_a_full_disk_or_no_directory_costs_records_is_said_once_and_shows_no_reader_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "ROTATE_BYTES", 1)
    store, seen = make_store(tmp_path), list[Path]()
    caplog.set_level("INFO")

    def full(table: pa.Table, where: Path, **options: Any) -> None:
        Path(where).write_bytes(b"PAR1")
        seen.extend(files(tmp_path))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        for step in range(3):
            store.add([verification(step)], 0.0)
            store.rotate(0.0)
    assert seen == []
    assert store.dropped()["verification"] == 3
    assert list(store.directory.iterdir()) == [store.directory / ABOUT]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    store.add([verification(9)], 0.0)
    store.close()
    assert (store.written["verification"], store.dropped()["verification"]) == (1, 3)
    assert books(store).dropped["verification"] == 3
    assert caplog.records[-1].message == "records are written again"
    (tmp_path / "file").write_text("")
    store = make_store(tmp_path / "file" / "records")
    store.add([STEP], 0.0)
    store.close()
    assert store.dropped()["step"] == 1
    assert "cannot be written" in caplog.text


def test_the_oldest_files_go_first_and_only_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "ROTATE_BYTES", 1)
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


@pytest.mark.parametrize("left", [b'{"about": {"verifier_id": "\xff"}}', None], ids=["no text", "a version without this kind"])
def test_the_oldest_files_go_whatever_an_earlier_process_left_beside_them(tmp_path: Path, left: bytes | None) -> None:
    old = make_store(tmp_path, About("verifier-0", "aaaaaaaa", 1.0, "off", "demo", 0))
    old.add([VerificationRow(n, os.urandom(50).hex(), n, 4, 2, 3, "d", False, False) for n in range(30_000)], 0.0)
    old.close()
    beside = books(old)
    beside.removed.clear()
    (old.directory / ABOUT).write_bytes(msgspec.json.encode(beside) if left is None else left)
    store = make_store(tmp_path, max_mib=1)
    store.add([STEP], 0.0)
    store.close()
    assert not old.directory.exists()
    assert books(store).ended


def test_what_the_queue_takes_is_written_at_the_end_and_the_rest_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "QUEUE_ROWS", 10_000)
    recorder = FileRecorder(ABOUT_V0, RecordsSettings(dir=str(tmp_path)))
    for step in range(10_002):
        recorder.put(verification(step))
    recorder.put(REQUEST)
    assert recorder.counts()[1] == {"step": 0, "verification": 2, "request": 1, "decision": 0}
    recorder.start()
    recorder.close()
    tables = [pq.read_table(file) for file in files(tmp_path, "verification")]
    assert pa.concat_tables(tables)["step"].to_pylist() == list(range(10_000))
    (about,) = tmp_path.rglob(ABOUT)
    assert msgspec.json.decode(about.read_bytes(), type=Books).dropped["verification"] == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "records"]


def test_a_row_that_is_none_costs_no_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = FileRecorder(ABOUT_V0, RecordsSettings(dir=str(tmp_path)))
    recorder.put(VerificationRow("x", *[None] * 8))  # type: ignore[arg-type]
    recorder.put(REQUEST)
    recorder.start()
    recorder.close()
    assert "of no use" in caplog.text
    assert recorder.counts() == ({**dict.fromkeys(KINDS, 0), "request": 1}, {**dict.fromkeys(KINDS, 0), "verification": 1})
