"""The bench's closed loop: throughput is that of the load that was named, not of its beginning and its end."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from backend.lab.bench import load
from backend.lab.bench.load import run_load


class Client:
    """Requests of two speeds: one token a tick, or two; the first answer of each takes ten ticks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers: dict[str, Any] = {}
        self._ids = count()
        self._most = 0

    def add(self, prompt: list[int], params: Any, options: Any) -> str:
        request_id = str(next(self._ids))
        self.answers[request_id] = SimpleNamespace(tokens=[], finish_reason=None, last_at=0.0, speed=prompt[0], wait=10)
        self._most = params.max_tokens
        return request_id

    def receive(self) -> None:
        pass

    def run_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        while not condition():
            self.now += 1.0
            for answer in self.answers.values():
                if answer.finish_reason is not None:
                    continue
                answer.wait -= 1
                if answer.wait < 0:
                    answer.tokens += [7] * min(answer.speed, self._most - len(answer.tokens))
                if len(answer.tokens) == self._most:
                    answer.finish_reason, answer.last_at = "length", self.now


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_equal_requests_are_as_fast_as_their_waves(client: Client) -> None:
    found = run_load(client, [[1]] * 6, 20, 0.0, 2)  # type: ignore[arg-type]
    assert found.wall_s == 90.0
    assert found.tokens_per_s == pytest.approx(2 * 20 / 30)


def test_the_end_at_a_smaller_concurrency_does_not_count(client: Client) -> None:
    """Fast requests end at 30, 60 and 90 beside a slow one that ends at 70: the last of them is alone for 20 ticks."""
    found = run_load(client, [[1], [3], [3], [3]], 60, 0.0, 2)  # type: ignore[arg-type]
    assert found.wall_s == 90.0
    assert found.tokens_per_s == pytest.approx((180 - 80) / (70 - 30))
    assert len(found.answers) == 4


def test_one_wave_counts_as_a_whole(client: Client) -> None:
    assert run_load(client, [[1], [2]], 20, 0.0, 2).tokens_per_s == pytest.approx(40 / 30)  # type: ignore[arg-type]
