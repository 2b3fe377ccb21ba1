"""A verifier that lives but gets no processor, under a real fleet: its process is stopped for seconds, again and again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.campaign]

PAUSE_S = 3.0
"""Longer than the coordinator's lease, shorter than the connection's own patience."""
TOKENS = 1500
BODY: dict[str, Any] = {"model": "demo", "prompt": "def f(", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def fleet() -> Iterator[ServedFleet]:
    running = ServedFleet("--mode", "off", "--drafters", "0")
    yield running
    assert running.stop() == 0


def verifier_pid(fleet: ServedFleet) -> int:
    (verifier,) = fleet.fleet()["verifiers"]
    return int(verifier["pid"])


class Stream:
    """A streamed completion in a thread."""

    def __init__(self, fleet: ServedFleet) -> None:
        self.chunks: list[Any] = []
        self.thread = threading.Thread(target=self._read, args=(fleet,), daemon=True)
        self.thread.start()

    def _read(self, fleet: ServedFleet) -> None:
        with fleet.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.chunks.append(json.loads(line.removeprefix("data: ")))

    @property
    def text(self) -> str:
        return "".join(chunk["choices"][0]["text"] for chunk in self.chunks if chunk.get("choices"))


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stream_survives_any_number_of_pauses(fleet: ServedFleet) -> None:
    expected = fleet.complete(BODY["prompt"], max_tokens=TOKENS, ignore_eos=True)["choices"][0]["text"]
    pid, stream = verifier_pid(fleet), Stream(fleet)
    for _ in range(3):
        seen = len(stream.chunks)
        wait_for(lambda n=seen: len(stream.chunks) > n + 5 or not stream.thread.is_alive(), 30)  # type: ignore[misc]
        assert stream.thread.is_alive(), "it is to be stopped in the middle"
        with stopped(pid):
            time.sleep(PAUSE_S)
    stream.thread.join(60)
    assert not [chunk for chunk in stream.chunks if "error" in chunk]
    assert stream.text == expected
    assert fleet.metric("outrider_poisoned_total") == 0
    assert verifier_pid(fleet) == pid


def test_requests_that_come_meanwhile_are_served_afterwards(fleet: ServedFleet) -> None:
    with ThreadPoolExecutor(4) as pool:
        requests: list[Future[Any]] = []
        with stopped(verifier_pid(fleet)):
            for _ in range(4):
                time.sleep(PAUSE_S / 4)
                requests.append(pool.submit(fleet.complete, BODY["prompt"], max_tokens=4))
        assert [len(request.result(30)["choices"]) for request in requests] == [1, 1, 1, 1]


def test_members_have_the_priority_of_whoever_started_them(fleet: ServedFleet) -> None:
    assert os.getpriority(os.PRIO_PROCESS, verifier_pid(fleet)) == os.getpriority(os.PRIO_PROCESS, fleet.process.pid)


def test_the_session_folder_is_ours(fleet: ServedFleet) -> None:
    # Ray writes what the verifier prints to a file there.
    opened = [os.readlink(each) for each in Path(f"/proc/{verifier_pid(fleet)}/fd").iterdir() if each.is_symlink()]
    (folder,) = {found[0] for name in opened if (found := re.match(r".*/or-ray-[^/]+", name))}
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
