"""Child processes of the benchmark: they answer, they end with their input, and a dead one is told by its last words."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.lab.bench.children import Child, ChildError, close_all
from backend.lab.bench.micro import measure_codec
from backend.transport import Hub, Wire


def test_an_echo_answers_and_ends_with_its_input(tmp_path: Path) -> None:
    import os

    cores = sorted(os.sched_getaffinity(0))[:1]
    child = Child({"role": "echo", "cores": cores, "address": f"ipc://{tmp_path}/e"}, tmp_path / "echo.log")
    hub = Hub(Wire())
    try:
        dealer = hub.dealer(child.wait_ready(), "test")
        dealer.send(b"one", b"two")
        received = None
        while received is None:
            assert hub.poll(20.0)
            received = dealer.receive()
        assert received == [b"one"], "the answer to a question is small, whatever came with the question"
    finally:
        hub.close()
        close_all([child])
    assert child.process.returncode == 0


def test_a_child_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = Child({"role": "nobody", "cores": [0]}, tmp_path / "nobody.log")
    with pytest.raises(ChildError, match="nobody ended unexpectedly") as found:
        child.wait_ready()
    assert "KeyError" in str(found.value)
    close_all([child])


def test_the_codec_is_measured() -> None:
    found = measure_codec(4, 4)
    assert found["encode_us"] > 0
    assert found["round_bytes"] > 0
    assert found["drafts_bytes"] > 0
