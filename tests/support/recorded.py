"""Makes directories of records, as verifiers write them, from rows of a test.  Tests only."""

from pathlib import Path

from backend.config import RecordsSettings
from backend.records.rows import DecisionRow, RequestRow, StepRow, VerificationRow
from backend.records.schema import About
from backend.records.store import RecordStore

Rows = list[StepRow | VerificationRow | RequestRow | DecisionRow]
START = 1_790_000_000.0


def record(directory: Path, rows: Rows, verifier_id: str = "verifier-0", incarnation: str = "aaaaaaaa", k: int = 4) -> Path:
    """Writes the records of one incarnation that has ended; returns its directory."""
    about = About(verifier_id, incarnation, START, "sync", "demo", k)
    store = RecordStore(about, RecordsSettings(dir=str(directory)))
    store.add(rows, 0.0)
    store.close()
    return store.directory


def step(number: int, at: float, *, requests: int = 2, tokens: int = 6, busy: float = 10.0, **idle_ms: float) -> StepRow:
    """A step that began `at` seconds after the start and took `busy` milliseconds."""
    return StepRow(
        number, START + at, busy if number else 0.0, requests, 0, tokens, requests, tokens, 4, 0, 3.0, 8.0, busy, idle_ms
    )


def verification(
    number: int, request_id: str, draft_tokens: int, accepted: int, drafter: str = "drafter-0", **flags: bool
) -> VerificationRow:
    """A verification that emits its accepted tokens and one more."""
    return VerificationRow(
        number,
        request_id,
        10,
        draft_tokens,
        accepted,
        accepted + 1,
        drafter if draft_tokens else "",
        flags.get("ahead", False),
        flags.get("teacher_forced", False),
    )


def request(request_id: str, arrived: float, first: float, ended: float, tokens: int, reason: str = "length") -> RequestRow:
    """A request; times in seconds after the start."""
    return RequestRow(request_id, START + arrived, START + first, START + ended, 10, tokens, tokens, 0, 0, reason, False)
