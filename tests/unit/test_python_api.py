"""`outrider.Fleet` against an HTTP transport that stands in for the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from outrider import Fleet, OutriderError

Answer = Callable[[dict[str, Any]], httpx.Response]


def choice(body: dict[str, Any]) -> httpx.Response:
    return httpx.Response(
        200,
        json={
            "choices": [
                {
                    "text": "x",
                    "token_ids": [body.get("seed", 0)],
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {"token_logprobs": [-0.5]},
                    "finish_reason": "length",
                }
            ]
        },
    )


def joined(answer: Answer, **settings: Any) -> Fleet:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        return answer(json.loads(request.content))

    return Fleet.join("http://fleet/v1", transport=httpx.MockTransport(handle), **settings)


def test_every_sample_of_every_prompt_comes_once_with_a_seed_of_its_own() -> None:
    with joined(choice, concurrency=2) as fleet:
        samples = list(fleet.generate([[1], [2]], {"seed": 5, "logprobs": 0}, n=3))
    assert sorted((s.index, s.sample, s.token_ids[0]) for s in samples) == [(i, j, 5 + j) for i in (0, 1) for j in range(3)]
    assert {tuple(s.prompt_token_ids) for s in samples} == {(1,), (2,)}
    assert samples[0].logprobs == [-0.5]


def test_an_object_gives_its_fields_and_none_is_left_out() -> None:
    seen: list[dict[str, Any]] = []
    with joined(lambda body: (seen.append(body), choice(body))[1]) as fleet:
        list(fleet.generate([[1]], SimpleNamespace(temperature=0.5, seed=None)))
    assert seen[0]["temperature"] == 0.5
    assert "seed" not in seen[0]


@pytest.mark.parametrize("fault", ["busy", "disconnect"])
def test_what_passes_is_tried_again(fault: str) -> None:
    tries: list[int] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        tries.append(1)
        if len(tries) > 1:
            return choice(body)
        if fault == "disconnect":
            raise httpx.ReadError("gone")
        return httpx.Response(503, headers={"retry-after": "0"}, json={"error": {"message": "busy", "code": "busy"}})

    with joined(answer) as fleet:
        assert len(list(fleet.generate([[1]]))) == 1
    assert len(tries) == 2


def test_a_refusal_is_raised_at_once_with_its_code() -> None:
    tries: list[int] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        tries.append(1)
        return httpx.Response(400, json={"error": {"message": "n is wrong", "code": "bad_n"}})

    with joined(answer) as fleet, pytest.raises(OutriderError) as raised:
        list(fleet.generate([[1]]))
    assert (raised.value.status, raised.value.code, raised.value.message) == (400, "bad_n", "n is wrong")
    assert len(tries) == 1


def test_what_was_submitted_is_polled_once() -> None:
    with joined(choice) as fleet:
        number = fleet.submit([1], {"seed": 1}, n=2)
        while (samples := fleet.poll(number)) is None:
            pass
        assert [s.token_ids for s in samples] == [[1], [2]]
        with pytest.raises(KeyError):
            fleet.poll(number)
        fleet.cancel(number)
