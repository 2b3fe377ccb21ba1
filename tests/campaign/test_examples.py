"""The examples run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.fleet_process import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.campaign]


@pytest.mark.parametrize("options", [(), ("--off-policy",), ("--mode", "off")], ids=["on-policy", "off-policy", "off"])
def test_two_steps_of_grpo(options: tuple[str, ...]) -> None:
    command = [sys.executable, "examples/grpo.py", "--steps", "2", "--max-tokens", "16", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"reward (\S+) .* acceptance length (\S+) +weights (\d+)-(\d+)", done.stdout)
    assert len(steps) == 2
    assert all(0 < float(reward) <= 1 for reward, *_ in steps)
    assert all((float(length) > 1) == ("off" not in options) for _, length, *_ in steps)
    assert steps[0][2:] == ("0", "0")
    # Off policy the second rollout began before the update; it may have ended before it, too.
    assert steps[1][2] == ("0" if "--off-policy" in options else "1")


def test_the_readmes_fleet_in_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "from outrider import Fleet" in block)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = done.stdout.splitlines()
    assert len(answers) == 4
    assert all(re.search(r"-\d+\.\d+", answer) for answer in answers), "each has its tokens' log probabilities"
