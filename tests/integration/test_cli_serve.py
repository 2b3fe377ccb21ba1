"""`outrider serve` as a process that does not come up, or is killed (how it comes up and ends: `served/`); a gateway as one."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.fleet_process import home_of_fleets, outrider
from tests.support.process_tree import descendants, leftovers, name_of, wait_gone
from tests.support.processes import Child
from tests.support.running_gateway import MODEL_DIR, gateway_process

pytestmark = pytest.mark.engine

START_S = 200.0


@pytest.fixture
def home() -> Iterator[Path]:
    with home_of_fleets() as directory:
        yield directory


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern!r} never came:\n{''.join(seen)}")


@pytest.mark.campaign
def test_a_killed_fleet_ends_and_the_next_command_cleans_up(home: Path) -> None:
    process = outrider("serve", "--port", "0", "--mode", "off")
    try:
        read_until(process, r"Ray up")
        read_until(process, r"verifier-0: process up")
        # Ray's agents look for their parent once a minute; everything else ends with it.
        family = [pid for pid in descendants(process.pid) if "Agent" not in name_of(pid)]
        process.kill()
        process.wait()
        wait_gone(family)
        assert any(home.glob("or-ray-*"))
        status = outrider("status")
        assert "no fleet" in status.communicate(timeout=120)[0]
        assert not any(home.glob("or-ray-*"))
    finally:
        process.kill()


@pytest.mark.campaign
def test_an_engine_that_cannot_start_is_one_line_and_exit_1(home: Path) -> None:
    process = outrider("serve", "--port", "0", "--mode", "off", "--verifier-engine-args", '{"max_model_len": 1000000}')
    try:
        output = process.communicate(timeout=START_S)[0]
    finally:
        process.kill()
    assert process.returncode == 1
    assert len(re.findall(r"^outrider: verifier-0 failed to start: .*max_model_len.*$", output, re.MULTILINE)) == 1
    assert "Traceback" not in output
    assert leftovers(home) == []


def test_a_signal_while_starting_ends_everything(home: Path) -> None:
    process = outrider("serve", "--port", "0", "--mode", "off")
    try:
        read_until(process, r"CPU cores")
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 130
        wait_gone(family)
    finally:
        process.kill()


def test_a_signal_ends_a_gateway_cleanly(tmp_path: Path) -> None:
    """Another one, Ctrl-C's, ends the fleet of `tests/integration/served`."""
    with Child(gateway_process, {"model": MODEL_DIR}, tmp_path) as gateway:
        assert httpx.get(f"{gateway.address}/livez").status_code == 200
        os.kill(gateway.pid, signal.SIGTERM)
        gateway.process.join(30)
        assert gateway.process.exitcode == 0
