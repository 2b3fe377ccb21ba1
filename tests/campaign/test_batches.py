"""Batches: a gateway that is killed loses no line and doubles none; and what people notice of a batch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest

from backend.fleet import VerifierStats
from backend.fleet.speed import Speed
from tests.support import run_gateway
from tests.support.fake_verifier import FakeVerifier, count_up, eventually
from tests.support.processes import Child
from tests.support.running_gateway import COMPLETION, MODEL_DIR

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(900)]

LINES = 1000
ROOM = 30
"""Lines at a time that the speed below allows."""
SPEED = Speed(1.0, 0.1)


def jsonl(count: int, body: dict[str, Any]) -> bytes:
    lines = [{"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


async def slowly(verifier: FakeVerifier, sequence: Any) -> None:
    await asyncio.sleep(0.05)
    await count_up(verifier, sequence)


async def test_a_thousand_lines_and_a_gateway_that_is_killed_twice(tmp_path: Path) -> None:
    verifier = FakeVerifier(tmp_path).start()
    verifier.behaviour = slowly
    settings = {"state_dir": str(tmp_path / "state"), "served_model_name": "demo"}
    job = {"model": MODEL_DIR, "members": [verifier.member], "gateway": settings}
    batch_id, gateways = "", []
    try:
        for kill_after in (LINES // 3, 2 * LINES // 3, None):
            known = len(verifier.clients)
            gateway = await asyncio.to_thread(Child, run_gateway.main, job, tmp_path)
            gateways.append(gateway)
            await eventually(lambda known=known: len(verifier.clients) > known)  # type: ignore[misc]
            verifier.publish(VerifierStats(verifier.name, 1000.0, "sync", 4, speed=SPEED))
            async with openai.AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key="none") as client:
                if not batch_id:
                    file = await client.files.create(file=jsonl(LINES, COMPLETION), purpose="batch")
                    begun = await client.batches.create(
                        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                    )
                    batch_id = begun.id
                while True:
                    batch = await client.batches.retrieve(batch_id)
                    assert batch.request_counts is not None
                    if kill_after is None and batch.status == "completed":
                        break
                    if kill_after is not None and batch.request_counts.completed >= kill_after:
                        os.kill(gateway.pid, signal.SIGKILL)
                        break
                    assert batch.status in ("validating", "in_progress", "finalizing")
                    await asyncio.sleep(0.02)
                if kill_after is None:
                    assert batch.output_file_id is not None
                    text = (await client.files.content(batch.output_file_id)).text
                    files = [each.purpose async for each in client.files.list()]
        answers = [json.loads(line) for line in text.splitlines()]
        assert Counter(each["custom_id"] for each in answers) == Counter(f"line-{n}" for n in range(LINES))
        assert {each["response"]["status_code"] for each in answers} == {200}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        assert sorted(files) == ["batch", "batch_output"]
        # What was in flight, or answered and not yet written down, when a gateway was killed ran again, and nothing else did.
        assert LINES < len(verifier.sequences) <= LINES + 2 * 2 * ROOM
        print(f"{len(verifier.sequences) - LINES} of {LINES} lines ran twice")
    finally:
        for gateway in gateways:
            gateway.close()
        verifier.close()
