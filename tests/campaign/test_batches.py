"""Batches: a gateway that is killed loses no line and doubles none."""

import asyncio
import os
import signal
from collections import Counter
from typing import Any

import openai
import pytest

from backend.fleet import VerifierStats
from backend.fleet.speed import Speed
from tests.integration.test_gateway_batches import TEXTS, begin, jsonl, lines_of, request, until
from tests.support.fake_verifier import FakeVerifier, count_up
from tests.support.processes import Child
from tests.support.running_gateway import COMPLETION, MODEL_DIR, gateway_process

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

LINES = 1000
ROOM = 30
"""Lines at a time that the speed below allows."""
SPEED = Speed(1.0, 0.1)
WELL = ("validating", "in_progress", "finalizing", "completed")


async def slowly(verifier, sequence):
    await asyncio.sleep(0.05)
    await count_up(verifier, sequence)


async def test_a_thousand_lines_and_a_gateway_that_is_killed_twice(tmp_path):
    verifier = FakeVerifier(tmp_path).start()
    verifier.behaviour = slowly
    settings = {"state_dir": str(tmp_path / "state"), "served_model_name": "demo"}
    job = {"model": MODEL_DIR, "members": [verifier.member], "gateway": settings}
    batch: Any = None
    gateways: list[Child] = []
    try:
        for enough in (LINES // 3, 2 * LINES // 3, LINES):
            known = len(verifier.clients)
            gateways.append(await asyncio.to_thread(Child, gateway_process, job, tmp_path))
            while len(verifier.clients) == known:
                await asyncio.sleep(0.01)
            verifier.publish(VerifierStats(verifier.name, 1000.0, "sync", 4, speed=SPEED))
            async with openai.AsyncOpenAI(base_url=f"{gateways[-1].address}/v1", api_key="none") as client:
                batch = batch or await begin(client, jsonl(*(request(f"{n}", COMPLETION, TEXTS) for n in range(LINES))), TEXTS)
                while (batch := await until(client, batch, *WELL)).request_counts.completed < enough:
                    await asyncio.sleep(0.02)
                if enough < LINES:
                    os.kill(gateways[-1].pid, signal.SIGKILL)
                    continue
                batch = await until(client, batch, "completed")
                answers = await lines_of(client, batch.output_file_id)
                assert sorted([each.purpose async for each in client.files.list()]) == ["batch", "batch_output"]
        assert Counter(each["custom_id"] for each in answers) == Counter(f"{n}" for n in range(LINES))
        assert {each["response"]["status_code"] for each in answers} == {200}
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        # What was in flight, or answered and not yet written down, when a gateway was killed ran again, and nothing else did.
        assert LINES < len(verifier.sequences) <= LINES + 2 * 2 * ROOM
        print(f"{len(verifier.sequences) - LINES} of {LINES} lines ran twice")
    finally:
        for gateway in gateways:
            gateway.close()
        verifier.close()
