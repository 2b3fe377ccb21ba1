"""The examples run as a reader would run them; a fleet that a Ray actor starts."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.fleet_process import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

IN_AN_ACTOR = """
import ray
from outrider import Fleet

@ray.remote
class Trainer:
    def tokens(self):
        with Fleet("demo", mode="off", drafters=0) as fleet:
            return [len(each.token_ids) for each in fleet.generate(["def f("], {"max_tokens": 4, "ignore_eos": True}, n=2)]

ray.init(address="local", num_cpus=2, include_dashboard=False)
print(ray.get(Trainer.remote().tokens.remote()))
"""


def run(*arguments: str) -> str:
    """What Python writes, run with these arguments."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--off-policy",), ("--mode", "off")], ids=["on-policy", "off-policy", "off"])
def test_two_steps_of_grpo(options: tuple[str, ...]) -> None:
    output = run("examples/grpo.py", "--steps", "2", "--max-tokens", "16", *options)
    steps = re.findall(r"reward (\S+) .* acceptance length (\S+) +weights (\d+)-(\d+)", output)
    assert len(steps) == 2
    assert all(0 < float(reward) <= 1 for reward, *_ in steps)
    assert all((float(length) > 1) == ("off" not in options) for _, length, *_ in steps)
    assert steps[0][2:] == ("0", "0")
    # Off policy the second rollout began before the update; it may have ended before it, too.
    assert steps[1][2] == ("0" if "--off-policy" in options else "1")


def test_the_readmes_fleet_in_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = next(block for block in blocks if "from outrider import Fleet" in block)
    answers = run("-c", code).splitlines()
    assert len(answers) == 4
    assert all(re.search(r"-\d+\.\d+", answer) for answer in answers), "each has its tokens' log probabilities"


def test_a_fleet_of_a_ray_actor() -> None:
    assert run("-c", IN_AN_ACTOR).splitlines()[-1] == "[4, 4]"
