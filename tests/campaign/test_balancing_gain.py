"""Requests that all lie at one of two verifiers end sooner where the gateway may move them."""

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

REQUESTS = 16
TOKENS = 3000


def mean_latency_s(fleet: ServedFleet) -> float:
    """Of requests that come while one verifier is drained, and that both might serve a moment later."""

    def ask(number: int) -> float:
        began = time.monotonic()
        fleet.complete(f"def f{number}(x):\n", max_tokens=TOKENS, temperature=1.0, seed=number, ignore_eos=True)
        return time.monotonic() - began

    def states() -> dict[str, str]:
        return {each["id"]: each["state"] for each in fleet.fleet()["verifiers"]}

    fleet.http.post("/admin/drain", json={"member": "verifier-1"}).raise_for_status()
    wait_for(lambda: states()["verifier-1"] == "draining")
    with ThreadPoolExecutor(REQUESTS) as pool:
        latencies = pool.map(ask, range(REQUESTS))
        wait_for(lambda: sum(each["running"] for each in fleet.fleet()["verifiers"]) == REQUESTS)
        fleet.http.post("/admin/resume", json={"member": "verifier-1"}).raise_for_status()
        return statistics.mean(latencies)


def test_balancing_gains_what_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    def start(name: str, **options: Any) -> ServedFleet:
        return ServedFleet("--mode", "off", "--verifiers", "2", "--ray-namespace", f"{name}-{os.getpid()}", **options)

    never = {"gateway.fleet.balancing.INTERVAL_S": 1e6}
    with start("without", constants=never) as without, start("balanced") as balanced:
        ratios = [mean_latency_s(without) / mean_latency_s(balanced) for _ in range(2)]
    with capsys.disabled():
        print("mean latency without balancing over that with it:", *(f"{ratio:.2f}" for ratio in ratios))
    assert min(ratios) > 1.1
