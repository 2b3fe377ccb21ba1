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

    def add(self, prompt: list[int], params: Any, options: Any) -> str:
        request_id = str(next(self._ids))
        about = {"speed": prompt[0], "wait": 10, "most": params.max_tokens}
        self.answers[request_id] = SimpleNamespace(tokens=[], finish_reason=None, last_at=0.0, **about)
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
                    answer.tokens += [7] * min(answer.speed, answer.most - len(answer.tokens))
                if len(answer.tokens) == answer.most:
                    answer.finish_reason, answer.last_at = "length", self.now


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    found = Client()
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_what_is_measured_is_the_speed_of_a_long_load(client: Client) -> None:
    """Few waves show the same, though requests are of two speeds and the first answers are cut short.  One wave is whole."""
    slow, fast = 20 / 30, 20 / 20
    for waves, near in ((3, 0.12), (40, 0.02)):
        found = run_load(client, [[1 + i % 2] for i in range(4 * waves)], 20, 0.0, 4)  # type: ignore[arg-type]
        assert [len(answer.tokens) for answer in found.answers] == [5, 10, 15, *[20] * (4 * waves - 3)]
        assert len(found.whole) == 4 * waves - 3
        assert slow < found.tokens_per_s / 4 < fast
        assert found.tokens_per_s == pytest.approx(4 * 20 / 25, rel=near)
    assert run_load(client, [[1], [2]], 20, 0.0, 2).tokens_per_s == pytest.approx(40 / 30)  # type: ignore[arg-type]


def test_the_end_at_a_smaller_concurrency_does_not_count(client: Client) -> None:
    """Fast requests end at 20, 50 and 80 beside a slow one that ends at 70: the last of them is alone for 10 ticks."""
    found = run_load(client, [[3], [1], [3], [3]], 60, 0.0, 2)  # type: ignore[arg-type]
    assert found.wall_s == 80.0
    assert found.tokens_per_s == pytest.approx((30 + 60 + 60 + 30 - 40) / (70 - 20))
