"""`outrider train-drafter` on the demo target, from nothing: it gets better, is killed, goes on, and its head is a head."""

import csv
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from backend.lab.train_drafter import CURVE, newest_head
from backend.models.demo import TARGET_DIR
from tests.support.drafter_heads import check
from tests.support.fleet_process import outrider, wait_for
from tests.support.processes import ENGINE_ENV

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

LIMIT_S = 400.0


def start(directory: Path, steps: int) -> subprocess.Popen[str]:
    data = directory / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"def read_{i}(path):\n    with open(path"}) + "\n" for i in range(200)))
    given = f"--model demo --data {data} --output {directory / 'o'} --steps {steps} --max-tokens 64"
    return outrider("train-drafter", *given.split(), env=os.environ | ENGINE_ENV | {"XDG_RUNTIME_DIR": str(directory)})


def curve(directory: Path) -> list[dict[str, str]]:
    file = directory / "o" / CURVE
    return list(csv.DictReader(file.open(newline=""))) if file.exists() else []


def test_a_head_is_trained_killed_and_trained_on(tmp_path: Path) -> None:
    first = start(tmp_path, 100_000)
    wait_for(lambda: newest_head(tmp_path / "o") is not None or first.poll() is not None, LIMIT_S, "a head")
    assert first.poll() is None, first.communicate()[0]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    with (tmp_path / "o" / "drafter-0" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its fleet ends by itself
    done = max(int(row["steps"]) for row in curve(tmp_path))
    # The curve lags behind the checkpoint, by ten seconds at most.
    second = start(tmp_path, done + 300)
    output, _ = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, output
    rows = [row for row in curve(tmp_path) if row["candidate_length"]]
    assert float(rows[-1]["candidate_length"]) > 1.2
    assert all(int(row["steps"]) >= 40 for row in curve(tmp_path)[-2:]), "it goes on from the checkpoint"
    head = newest_head(tmp_path / "o")
    assert head is not None
    assert str(head) in output
    assert check(str(head), str(TARGET_DIR)) == []
