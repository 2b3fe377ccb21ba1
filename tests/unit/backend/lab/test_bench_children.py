"""Child processes of the benchmark: they answer, they end with their pipe, and a dead one is told by its last words."""

import os
from pathlib import Path

import pytest

from backend.lab.bench.children import Child, ChildError, close_all
from backend.models.demo import TARGET_DIR


def test_a_drafter_answers_and_ends_with_its_pipe(tmp_path: Path) -> None:
    job = {
        "role": "drafter",
        "name": "d",
        "cores": sorted(os.sched_getaffinity(0))[:1],
        "target_dir": str(TARGET_DIR),
        "head_dir": None,
        "settings": {"cores": 1},
        "address": f"ipc://{tmp_path}/d",
    }
    child = Child(job, tmp_path / "d.log")
    try:
        assert child.wait_ready() == job["address"]
        assert child.ask("stats").drafts == 0
    finally:
        close_all([child])
    assert child.process.exitcode == 0


def test_a_child_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = Child({"role": "nobody", "cores": [0]}, tmp_path / "nobody.log")
    with pytest.raises(ChildError, match="nobody ended unexpectedly") as found:
        child.wait_ready()
    assert "KeyError" in str(found.value)
    close_all([child])
