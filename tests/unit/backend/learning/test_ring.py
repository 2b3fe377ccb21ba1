"""Learning from live traffic: the replay ring, and what is recorded in it."""

import random
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from backend.drafter.lessons import CONTEXT, Lessons
from backend.learning import ring as ring_module
from backend.learning.ring import EXAMINED, Replay, ReplayRing, ReplayWriter, is_held_out
from backend.learning.rules import COMPARED, FEWEST, Watch
from backend.learning.trainable import LONGEST
from backend.wire.drafting import Commit, Open, Outcome

WIDTH = 6


def replay(rows: int = 20, seed: int = 0) -> Replay:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 50, (rows + 1,), generator=generator, dtype=torch.int32)
    return Replay(tokens, torch.randn(rows, WIDTH, generator=generator), 4, 9, 0.8)


# -- the ring ----------------------------------------------------------------------------------------------------------


def test_a_ring_gives_back_what_it_got_and_drops_the_oldest(tmp_path: Path) -> None:
    ring = ReplayRing(tmp_path / "ring", 4096)
    first = ring.open_for_writing()
    for number in range(first, first + 12):
        ring.write(number, replay(seed=number))
    numbers = ring.numbers()
    assert numbers == list(range(numbers[0], first + 12))
    assert len(numbers) < 12
    assert sum(path.stat().st_size for path in (tmp_path / "ring").iterdir()) <= 4096
    found, written = ring.read(numbers[-1]), replay(seed=numbers[-1])
    assert found is not None
    assert torch.equal(found.tokens, written.tokens)
    assert torch.equal(found.features, written.features)
    assert (found.first, found.prompt, found.temperature) == (4, 9, 0.8)
    assert ring.read(first) is None


def test_pieces_cover_all_generated_rows_and_keep_rows_and_tokens_together() -> None:
    whole, dice = replay(100), random.Random(0)
    answers = whole.prompt - whole.first
    firsts = set()
    for _ in range(1000):
        piece = whole.piece(30, dice)
        start = piece.first - whole.first
        firsts.add(start)
        assert torch.equal(piece.features, whole.features[start : start + 30])
        assert torch.equal(piece.tokens, whole.tokens[start : start + 31])
    assert firsts == set(range(answers, 71))
    # Fewer answers than rows: they are all in it.
    assert {whole.piece(97, dice).first for _ in range(20)} == {whole.first + 3}
    assert torch.equal(whole.piece(200, dice).features, whole.features)


@pytest.mark.parametrize(("rows", "spared"), [(200, EXAMINED), (1024, FEWEST)])
def test_a_small_ring_spares_enough_held_out_sequences_for_a_comparison(tmp_path: Path, rows: int, spared: int) -> None:
    room = 2 * FEWEST * 30_000
    ring, numbers = ReplayRing(tmp_path, room), range(1, 11 * EXAMINED)
    for number in numbers:
        ring.write(number, replay(rows))
    kept = ring.numbers()
    held_out, others = list(filter(is_held_out, kept)), [number for number in kept if not is_held_out(number)]
    assert len(held_out) == spared
    assert len(others) >= spared - 1
    assert held_out == list(filter(is_held_out, numbers))[-len(held_out) :]
    assert others == [number for number in numbers if not is_held_out(number)][-len(others) :]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= room


def test_a_ring_leaves_as_much_memory_free_as_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken() -> int:
        return sum(path.stat().st_size for path in tmp_path.iterdir())

    monkeypatch.setattr("shutil.disk_usage", lambda _: Mock(free=20_000 - taken()))
    ring = ReplayRing(tmp_path, 1 << 20, 1 << 20)
    for number in range(1, 60):
        ring.write(number, replay())
        assert taken() <= 10_000
    assert ring.numbers()[-1] == 59
    assert taken() > 9_000


def test_a_killed_writer_leaves_nothing_that_a_reader_takes_for_a_sequence(tmp_path: Path) -> None:
    ring = ReplayRing(tmp_path, 1 << 20)
    ring.write(ring.open_for_writing(), replay())
    for unfinished in ("2.part", ".tmpAbC123"):
        (tmp_path / unfinished).write_bytes(b"half")
    (tmp_path / f"{3:012d}.safetensors").write_bytes(b"spoiled")
    assert ring.numbers() == [1, 3]
    assert ring.read(3) is None
    assert ReplayRing(tmp_path, 1 << 20).open_for_writing() == 4
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_a_writer_ends_although_the_file_system_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "PATIENCE_S", 0.05)
    ring, released = ReplayRing(tmp_path, 1 << 20), threading.Event()
    monkeypatch.setattr(ring, "write", lambda number, replay: released.wait())
    writer = ReplayWriter(ring)
    try:
        while not writer.dropped:
            writer.put(replay())
        writer.stop()
    finally:
        released.set()


# -- what is recorded --------------------------------------------------------------------------------------------------


def recording(watch: Watch | None = None) -> tuple[list[Replay], Lessons]:
    """What is kept, and what records it."""
    kept: list[Replay] = []
    return kept, Lessons(Mock(put=kept.append), watch or Watch())


def feature(first: int, rows: int) -> torch.Tensor:
    """Rows that say which position they are of."""
    return torch.arange(first, first + rows, dtype=torch.float32)[:, None].expand(-1, WIDTH)


def commit(base_len: int, rows: int) -> Commit:
    return Commit("r", base_len, [7] * rows, rows)


def test_sequences_are_recorded_with_their_rows_and_the_end_of_a_long_prompt() -> None:
    kept, lessons = recording()
    prompt = CONTEXT + 100
    lessons.opened("r", Open("r", prompt + 1, [5] * (prompt + 1), prompt, temperature=0.7, prompt=prompt), feature(0, prompt))
    for step in range(10):
        at = prompt + 1 + 3 * step
        lessons.committed("r", commit(at + 3, 3), feature(at - 1, 3))
    lessons.closed("r")
    (found,) = kept
    assert (found.first, found.prompt, found.temperature) == (100, prompt, 0.7)
    assert torch.equal(found.features[:, 0], torch.arange(100.0, prompt + 30))
    assert found.tokens.tolist() == [5] * (CONTEXT + 1) + [7] * 30


@pytest.mark.parametrize("rows", [LONGEST + 300, 2 * LONGEST + 300])
def test_of_a_long_sequence_the_end_is_kept(rows: int) -> None:
    kept, lessons = recording()
    lessons.opened("r", Open("r", rows + 1, [*range(rows + 1)], rows, prompt=10), feature(0, rows))
    lessons.closed("r")
    (found,) = kept
    first = rows - LONGEST
    assert (found.first, found.prompt) == (first, 10)
    assert torch.equal(found.features[:, 0], torch.arange(float(first), rows))
    assert found.tokens.tolist() == [*range(first, rows + 1)]


def test_recomputed_rows_replace_earlier_ones_and_a_gap_ends_the_record() -> None:
    kept, lessons = recording()
    lessons.opened("r", Open("r", 41, [5] * 41, 40, prompt=10), feature(0, 40))
    lessons.committed("r", commit(43, 10), feature(32, 10))
    lessons.closed("r")
    assert torch.equal(kept[0].features[:, 0], torch.arange(42.0))
    lessons.opened("r", Open("r", 41, [5] * 41, 40, prompt=10), feature(0, 40))
    lessons.committed("r", commit(46, 4), feature(41, 4))
    lessons.closed("r")
    assert len(kept) == 1


def test_drafts_are_judged_by_their_first_token_also_where_nothing_may_be_recorded() -> None:
    watch = Watch()
    kept, lessons = recording(watch)
    lessons.opened("r", Open("r", 41, [5] * 41, 40, learn=False), feature(0, 40))
    at = 41
    for _ in range(COMPARED):
        lessons.drafted("r", at, [7])
        lessons.drafted("r", at, [9])
        lessons.drafted("r", at, [])
        lessons.imagined("r", at, [7, 7], [Outcome(1, 3, [7]), Outcome(2, 7, [7, 1])])
        lessons.committed("r", commit(at + 3, 3), feature(at - 1, 3))
        lessons.committed("r", commit(at + 4, 1), feature(at + 2, 1))
        at += 4
    lessons.closed("r")
    # Of each two fresh drafts one; the outcome that came; the other one never came.
    assert watch.acceptance == pytest.approx(2 / 3, abs=0.05)
    assert not kept
