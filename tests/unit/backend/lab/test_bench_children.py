"""Child processes of the benchmark: they answer, they end with their pipe, and a dead one is told by its last words."""

import os
from pathlib import Path

import pytest

from backend.lab.bench.children import ChildError
from backend.lab.bench.engines import Processes
from backend.lab.bench.plan import CoreSplit
from tests.support.processes import demo_models


def test_children_answer_and_end_with_their_pipe_and_a_dead_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.lab.bench.engines.prepare_process", lambda: None)
    cores = tuple(sorted(os.sched_getaffinity(0))[:1])
    with Processes(demo_models(), CoreSplit(cores, cores), tmp_path) as processes:
        child, drafter = processes.drafter("d", None)
        assert drafter.address.startswith(f"ipc://{tmp_path}/")
        stats, paced = child.ask()
        assert (stats.drafts, paced) == (0, None)
        with pytest.raises(ChildError, match="other ended unexpectedly") as found:
            processes.drafter("other", str(tmp_path / "none"))
        assert "CheckpointError" in str(found.value)
    assert child.process.exitcode == 0
