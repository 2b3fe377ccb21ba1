"""Verifiers of a real fleet lend their places and get them back: a burst, deaths while lent, a command.

Whatever happens, every request is answered, and greedy text is what it is undisturbed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.chaos.census import pid_of_actor
from tests.support.fleet_process import ROOT, ServedFleet, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(600)]

PROMPTS = [f"def function_{i}(a, b):\n    " for i in range(12)]
TOKENS = 200


def serve(*arguments: str) -> ServedFleet:
    # One request at a time is all the load there is before the burst, so only one verifier is needed then.
    return ServedFleet(
        *("--mode", "sync", "--verifiers", "2", "--drafters", "1", "--elastic-enabled", "true", "--elastic-idle-s", "1"),
        *("--elastic-rest-s", "2", "--elastic-min-gain", "0", "--gateway-affinity", "session", *arguments),
        *("--ray-namespace", f"elastic-{os.getpid()}"),
    )


@pytest.fixture(params=["sleep", "swap"])
def fleet(request: pytest.FixtureRequest) -> Iterator[ServedFleet]:
    fleet = serve("--elastic-method", request.param)
    yield fleet
    fleet.stop()


def answer(fleet: ServedFleet, prompt: str) -> str:
    # One session: as long as there is no more than that, affinity keeps all of it at one verifier.
    text: str = fleet.complete(prompt, max_tokens=TOKENS, ignore_eos=True, user="one")["choices"][0]["text"]
    return text


class Trickle:
    """One request after the other until the block ends; `wrong` holds what was answered otherwise than expected."""

    def __init__(self, fleet: ServedFleet, expected: dict[str, str]) -> None:
        self.answered = 0
        self.wrong: list[str] = []
        self._fleet, self._expected = fleet, expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Trickle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            prompt = PROMPTS[self.answered % len(PROMPTS)]
            try:
                right = answer(self._fleet, prompt) == self._expected[prompt]
            except Exception as error:
                self.wrong.append(f"{prompt}: {error!r}")
                return
            self.answered += 1
            self.wrong += [] if right else [prompt]


def loans(fleet: ServedFleet) -> dict[str, Any]:
    return {each["verifier_id"]: each for each in fleet.fleet()["loans"]}


def lent(fleet: ServedFleet, to_whom: Callable[[dict[str, Any]], bool] = lambda loan: True) -> dict[str, Any]:
    """Waits for a place to be lent; returns the loan."""
    found: list[dict[str, Any]] = []

    def is_lent() -> bool:
        found[:] = [each for each in loans(fleet).values() if each["phase"] == "lent" and to_whom(each)]
        return bool(found)

    wait_for(is_lent, 90, "a lent place")
    return found[0]


def drafted(fleet: ServedFleet, drafter: str) -> float:
    return fleet.metric("outrider_accepted_tokens_total", drafter=drafter)


def serving(fleet: ServedFleet) -> int:
    return sum(each["state"] == "ready" for each in fleet.fleet()["verifiers"])


def test_a_place_is_lent_drafts_and_comes_back_with_a_burst(fleet: ServedFleet) -> None:
    expected = {prompt: answer(fleet, prompt) for prompt in PROMPTS}
    with Trickle(fleet, expected) as trickle:
        loan = lent(fleet)
        before = drafted(fleet, loan["drafter_id"])
        wait_for(lambda: drafted(fleet, loan["drafter_id"]) > before + 20, 60, "drafts of the lent drafter are accepted")
        assert serving(fleet) == 1
        command = [sys.executable, "-m", "gateway.cli", "status", "--ray-namespace", f"elastic-{os.getpid()}"]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"place of {loan['verifier_id']}: lent to {loan['drafter_id']} ({loan['method']})" in shown
        began = time.monotonic()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            burst = [pool.submit(answer, fleet, prompt) for prompt in PROMPTS * 3]
            wait_for(lambda: serving(fleet) == 2, 60, "both verifiers serve")
            returned_s = time.monotonic() - began
            texts = [each.result() for each in burst]
        assert texts == [expected[prompt] for prompt in PROMPTS * 3]
        wait_for(lambda: not loans(fleet) or lent(fleet), 30, "the drafter is gone")
    print(f"{loan['method']}: both serve {returned_s:.1f} s after the burst began; {trickle.answered} requests besides it")
    assert not trickle.wrong
    assert fleet.metric("outrider_returns_total") >= 1
    assert fleet.metric("outrider_lends_failed_total") == 0
    assert fleet.metric("outrider_sequences_finished_total", reason="lost") == 0


def pid(fleet: ServedFleet, member: str) -> int:
    shown = fleet.fleet()
    return next((each["pid"] for each in (*shown["verifiers"], *shown["drafters"]) if each["id"] == member), 0)


def test_deaths_while_a_place_is_lent_cost_no_request_and_no_place() -> None:
    fleet = serve()
    try:
        expected = {prompt: answer(fleet, prompt) for prompt in PROMPTS}
        with Trickle(fleet, expected) as trickle:
            loan = lent(fleet)
            # The lent drafter: Ray starts it again, or the place goes back and is lent anew.
            victim = pid(fleet, loan["drafter_id"])
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: pid(fleet, loan["drafter_id"]) not in (0, victim), 60, "another lent drafter")
            before = drafted(fleet, loan["drafter_id"])
            wait_for(lambda: drafted(fleet, loan["drafter_id"]) > before + 20, 60, "it drafts again")
            # The verifier that stands aside: its place goes back, and both serve.
            loan = lent(fleet)
            os.kill(pid(fleet, loan["verifier_id"]), signal.SIGKILL)
            wait_for(lambda: fleet.metric("outrider_lends_failed_total") >= 1, 60, "the loan has ended")
            wait_for(lambda: serving(fleet) == 2, 90, "both verifiers serve")
            # The only verifier that serves: the other one comes back at once.
            loan = lent(fleet)
            other = next(each["id"] for each in fleet.fleet()["verifiers"] if each["id"] != loan["verifier_id"])
            began = time.monotonic()
            os.kill(pid(fleet, other), signal.SIGKILL)
            count = trickle.answered
            wait_for(lambda: trickle.answered > count + 1 or not trickle._thread.is_alive(), 60, "requests are answered")
            print(f"answers {time.monotonic() - began:.1f} s after the only serving verifier was killed")
        assert not trickle.wrong
        assert fleet.metric("outrider_sequences_finished_total", reason="lost") == 0
    finally:
        fleet.stop()


def test_a_coordinator_that_is_restarted_knows_the_loans_and_a_command_takes_a_place_back() -> None:
    fleet = serve()
    try:
        expected = {prompt: answer(fleet, prompt) for prompt in PROMPTS}
        with Trickle(fleet, expected) as trickle:
            loan = lent(fleet)
            coordinator = pid_of_actor(fleet.process.pid, "CoordinatorActor")
            assert coordinator is not None
            os.kill(coordinator, signal.SIGKILL)
            wait_for(lambda: loans(fleet).get(loan["verifier_id"], loan)["since_s"] < loan["since_s"], 60, "a new coordinator")
            assert loans(fleet)[loan["verifier_id"]]["drafter_id"] == loan["drafter_id"]
            wait_for(lambda: serving(fleet) == 1, 30, "the verifier is still away")
            answered = fleet.http.post("/admin/restart", json={"members": [loan["verifier_id"]]})
            assert answered.status_code == 202, answered.text
            operation = f"/admin/operations/{answered.json()['operation']}"
            wait_for(lambda: fleet.http.get(operation).json()["state"] in ("done", "failed"), 120, "the restart")
            assert fleet.http.get(operation).json()["state"] == "done"
            refused = fleet.http.post("/admin/remove", json={"member": lent(fleet)["drafter_id"]})
            assert refused.status_code == 409
        assert not trickle.wrong
    finally:
        fleet.stop()
