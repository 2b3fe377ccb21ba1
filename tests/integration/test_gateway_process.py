"""A gateway in a process of its own, and one in front of a real engine."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backend.fleet import Member
from tests.support import run_gateway
from tests.support.fake_verifier import eventually
from tests.support.processes import Child, Verifier
from tests.support.running_gateway import CHAT, COMPLETION, MODEL_DIR, running_gateway

pytestmark = pytest.mark.engine


def test_a_signal_ends_a_process_cleanly(tmp_path: Path) -> None:
    """Another one, Ctrl-C's, ends the fleet of `tests/integration/served`."""
    gateway = Child(run_gateway.main, {"model": MODEL_DIR}, tmp_path)
    try:
        assert httpx.get(f"{gateway.address}/livez").status_code == 200
        os.kill(gateway.pid, signal.SIGTERM)
        gateway.process.join(30)
        assert gateway.process.exitcode == 0
    finally:
        gateway.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    verifier = Verifier(tmp_path_factory.mktemp("engine"), {"mode": "off", "verifier": {"max_model_len": 512}})
    yield Member(verifier.name, "verifier", "incarnation", verifier.address, "", "node", verifier.pid, "demo", "ready")
    verifier.close()


async def test_a_real_engine_behind_the_gateway(engine):
    async with running_gateway(verifiers=0, mode="off") as running:
        running.directory.set_members([engine])
        await eventually(lambda: running.core.first_ready.is_set(), 30)
        greedy = {**COMPLETION, "prompt": "def add(a, b):\n", "temperature": 0, "max_tokens": 24}

        async def ask(path: str = "/v1/completions", **fields) -> dict:
            response = await running.http.post(path, json={**greedy, **fields} if "chat" not in path else {**CHAT, **fields})
            assert response.status_code == 200, response.text
            return response.json()

        alone = (await ask())["choices"][0]
        together = await asyncio.gather(*(ask() for _ in range(8)))
        assert {body["choices"][0]["text"] for body in together} == {alone["text"]}
        with_logprobs = (await ask(logprobs=2))["choices"][0]
        assert len(with_logprobs["logprobs"]["tokens"]) == 24
        assert len((await ask(n=3, temperature=1.0))["choices"]) == 3
        digits = (await ask(structured_outputs={"regex": "[0-9]{3}"}))["choices"][0]["text"]
        assert len(digits) == 3
        assert digits.isdigit()
        stopped = (await ask(stop=[alone["text"][6:8]]))["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert alone["text"].startswith(stopped["text"])
        chat = await ask("/v1/chat/completions", logprobs=True, top_logprobs=2)
        assert chat["choices"][0]["message"]["content"]

        endless = {**greedy, "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=endless) as response:
            await anext(response.aiter_raw())
        await eventually(lambda: running.idle)
        await eventually(lambda: bool(running.core.stats()) and running.core.stats()[0].running == 0, 30)
        assert running.core.stats()[0].tokens < 24 * 12 + 400
