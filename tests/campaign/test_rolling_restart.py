"""Every verifier and drafter of a fleet is restarted under load, and then one verifier is sent SIGTERM: no request fails, and
every text is what it is undisturbed."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

PROMPTS = [f"def function_{i}(a, b):\n    " for i in range(6)]
TOKENS = 240
CLIENTS = 4


def pids(fleet: ServedFleet) -> dict[str, int]:
    shown = fleet.fleet()
    return {each["id"]: each["pid"] for each in (*shown["verifiers"], *shown["drafters"]) if each["state"] == "ready"}


def test_restarts_cost_no_request_and_no_token() -> None:
    settings = ("--mode", "auto", "--verifiers", "2", "--drafters", "2", "--ray-namespace", f"rolling-{os.getpid()}")
    with ServedFleet(*settings) as fleet:
        expected = {prompt: fleet.stream(prompt, max_tokens=TOKENS) for prompt in PROMPTS}
        before = pids(fleet)
        over = threading.Event()

        def client(number: int) -> list[str]:
            """Prompts that were answered otherwise than undisturbed, and "" for each that was answered right."""
            wrong: list[str] = []
            while not over.is_set():
                prompt = PROMPTS[(number + len(wrong)) % len(PROMPTS)]
                wrong.append("" if fleet.stream(prompt, max_tokens=TOKENS) == expected[prompt] else prompt)
            return wrong

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(CLIENTS)]
            try:
                done = fleet.command("restart", "--rolling")
                after = pids(fleet)
                os.kill(after["verifier-0"], signal.SIGTERM)
                # Ray starts it again.
                wait_for(lambda: pids(fleet).get("verifier-0", after["verifier-0"]) != after["verifier-0"], 120, "another one")
            finally:
                over.set()
            answers = [answer for each in clients for answer in each.result()]
        print(done.stdout, f"{len(answers)} requests answered meanwhile")
        assert done.returncode == 0, done.stderr + done.stdout
        assert len(answers) > len(before) * CLIENTS
        assert not any(answers)
        assert after.keys() == before.keys()
        assert all(after[member] != before[member] for member in before)
        assert fleet.metric("outrider_migrations_total", cause="drain") > 0
        assert fleet.metric("outrider_sequences_finished_total", reason="lost") == 0
        assert fleet.metric("outrider_failovers_total") == 0
