"""Fleets that Python programs start: in a Ray actor, and by a program that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleet_process import ROOT, wait_for

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
UNTIL_KILLED = """
import signal
from outrider import Fleet

with Fleet("demo", mode="off", drafters=0) as fleet:
    print(*(each["pid"] for each in fleet.stats()["verifiers"] + fleet.stats()["gateways"]), flush=True)
    signal.pause()
"""


def start(code: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_a_fleet_of_a_ray_actor() -> None:
    output, _ = start(IN_AN_ACTOR).communicate(timeout=300)
    assert output.splitlines()[-1] == "[4, 4]"


def test_a_fleet_ends_with_the_program_that_started_it() -> None:
    program = start(UNTIL_KILLED)
    assert program.stdout is not None
    processes = [Path(f"/proc/{pid}") for pid in program.stdout.readline().split()]
    assert len(processes) == 2
    assert all(each.exists() for each in processes)
    program.send_signal(signal.SIGKILL)
    program.wait()
    wait_for(lambda: not any(each.exists() for each in processes), what="the fleet has ended")
