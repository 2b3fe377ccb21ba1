"""A verifier whose model two processes share, on CPUs: the same greedy text, drafted for from the first rank's features.

vLLM's executor runs each rank as a process of its own beside the verifier's; what one host can show of it is shown here.
"""

import os
import signal
from pathlib import Path

import psutil
import pytest
from vllm.sampling_params import SamplingParams

from backend.lab.bench.prompts import Prompts
from tests.support.fleet_process import ServedFleet, wait_for
from tests.support.processes import Drafter, Verifier, demo_models

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

REQUESTS, TOKENS = 8, 128
PROMPT = "def read_lines(path):\n    "


def prompts() -> list[list[int]]:
    source = Prompts(demo_models().target_dir, 64)
    return [source.make(f"ranks/{i}") for i in range(REQUESTS)]


def answers(directory: Path, mode: str, ranks: int) -> tuple[list[list[int]], float]:
    """What is answered greedily; the share of drafts whose first token was accepted."""
    settings = {"mode": mode, "verifier": {"lookup": False, "tensor_parallel": ranks}}
    with Verifier(directory, settings, deadline_s=5.0) as verifier, Drafter(directory) as drafter:
        verifier.set_drafters(*([] if mode == "off" else [drafter.ref]))
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        tokens = [answer.tokens for answer in verifier.client.generate(prompts(), params)]
        counted = verifier.client.fresh_stats().drafters.get("drafter-0")
        return tokens, counted.accepted_by_position[0] / counted.drafts if counted else 0.0


def test_two_ranks_draft_as_one_does_and_answer_the_same(tmp_path: Path) -> None:
    """First tokens are compared: how much more of a draft is verified follows from what steps take, and that differs."""
    plain, _ = answers(tmp_path, "off", 1)
    one, alone = answers(tmp_path, "sync", 1)
    assert one == plain
    for mode in ("sync", "ahead"):
        two, accepted = answers(tmp_path, mode, 2)
        print(f"{mode}: {accepted:.3f} of first tokens accepted, {alone:.3f} by one rank in sync")
        assert two == plain
        assert accepted == pytest.approx(alone, abs=0.1)


def test_a_rank_that_dies_takes_its_verifier_along_and_the_request_goes_on() -> None:
    shared_before = set(os.listdir("/dev/shm"))
    settings = ("--mode", "sync", "--verifier-tensor-parallel", "2", "--verifier-cores", "2")
    with ServedFleet(*settings, "--ray-namespace", f"ranks-{os.getpid()}") as fleet:
        text = fleet.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)["choices"][0]["text"]
        wait_for(lambda: fleet.metric("outrider_accepted_tokens_total", drafter="drafter-0") > 0, what="drafts that count")
        pid = fleet.fleet()["verifiers"][0]["pid"]
        below = psutil.Process(pid).children()
        ranks = [child.pid for child in below if "Worker_TP" in " ".join(child.cmdline())]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        # Whether it is sent before or after the loss is noticed: it waits for the verifier that Ray starts.
        assert fleet.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)["choices"][0]["text"] == text
        assert fleet.fleet()["verifiers"][0]["pid"] != pid
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert fleet.stop() == 0
    assert [name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist") and name not in shared_before] == []
