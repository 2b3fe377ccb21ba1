"""`outrider.Fleet` against an HTTP transport that stands in for the gateway, and a child process that does not start."""

import asyncio
import gc
import inspect
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backend.engine.front import SamplingParams
from outrider import AsyncFleet, Episode, Fleet, OutriderError, connection
from outrider.parameters import fields_of

Answer = Callable[[dict[str, Any]], httpx.Response | Awaitable[httpx.Response]]


def output(body: dict[str, Any]) -> httpx.Response:
    """One token, which is the seed."""
    choice = {
        "token_ids": [body["sampling_params"].get("seed", 0)],
        "logprobs": {"content": [{"logprob": -0.5}]},
        "finish_reason": "length",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
    return httpx.Response(200, json={"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}})


def refusal(code: str, status: int = 400) -> httpx.Response:
    return httpx.Response(status, headers={"retry-after": "0"}, json={"error": {"message": "no", "code": code}})


def joined(answer: Answer, requests: list[httpx.Request] | None = None, **settings: Any) -> Fleet:
    """Text is tokenized to its characters' codes."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo"}]})
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            tokens = [0] * body["add_special_tokens"] + [ord(each) for each in body["prompt"]]
            return httpx.Response(200, json={"tokens": tokens})
        made = answer(body)
        return made if isinstance(made, httpx.Response) else await made

    return Fleet.join("http://fleet/v1", transport=httpx.MockTransport(handle), **settings)


def test_every_sample_of_every_prompt_comes_once_with_a_seed_of_its_own() -> None:
    with joined(output, concurrency=2) as fleet:
        samples = list(fleet.generate([[1], "A"], {"seed": 5, "logprobs": 0}, n=3))
    assert sorted((s.index, s.sample, s.token_ids[0]) for s in samples) == [(i, j, 5 + j) for i in (0, 1) for j in range(3)]
    assert {tuple(s.prompt_token_ids) for s in samples} == {(1,), (0, 65)}
    assert (samples[0].logprobs, samples[0].weight_version, samples[0].cached_tokens) == ([-0.5], "3", 7)


def test_of_an_object_what_differs_from_its_class_is_sent() -> None:
    given = SamplingParams(n=2, seed=4, temperature=0.5, stop=["end"], max_tokens=16, prompt_logprobs=1)
    fields = {"n": 2, "seed": 4, "temperature": 0.5, "stop": ["end"], "max_tokens": 16, "prompt_logprobs": 1}
    assert fields_of(given) == fields
    assert fields_of(SimpleNamespace(temperature=0.5, seed=None)) == {"temperature": 0.5}
    assert fields_of({"temperature": 1.0, "top_p": None}) == {"temperature": 1.0}
    with joined(output) as fleet:
        assert sorted(s.token_ids[0] for s in fleet.generate([[1]], given)) == [4, 5]


@pytest.mark.parametrize(
    "faults",
    [
        [refusal("busy", 503)],
        [httpx.ReadError("gone")],
        # A verifier that is busy with long outputs turns the others away again and again: a sample waits as long as it takes.
        [refusal("overloaded", 503), refusal("rate_limit_exceeded", 429)] * 10,
    ],
)
def test_what_passes_is_tried_again(faults: list[Any]) -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        if not faults:
            return output(body)
        if isinstance(fault := faults.pop(0), Exception):
            raise fault
        return fault

    with joined(answer, retries=1) as fleet:
        assert len(list(fleet.generate([[1]]))) == 1
    assert not faults


def test_a_gateway_may_be_gone_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LONGEST_WAIT_S", 0.0)
    faults = itertools.chain([httpx.ReadError("gone")] * 1100, [None])

    def answer(body: dict[str, Any]) -> httpx.Response:
        if fault := next(faults):
            raise fault
        return output(body)

    with joined(answer, retries=2000) as fleet:
        assert len(list(fleet.generate([[1]]))) == 1


@pytest.mark.parametrize(
    ("status", "code", "headers", "tries"),
    [
        (400, "bad_n", {}, 1),
        (429, "too_large", {"x-should-retry": "false"}, 1),
        (503, "no_verifier_ready", {"retry-after": "0"}, 2),
    ],
)
def test_a_refusal_is_raised_with_its_code(status: int, code: str, headers: dict[str, str], tries: int) -> None:
    requests: list[httpx.Request] = []
    answer = httpx.Response(status, headers=headers, json={"error": {"message": "no", "code": code}})
    with joined(Mock(return_value=answer), requests, retries=1) as fleet, pytest.raises(OutriderError) as raised:
        list(fleet.generate([[1]]))
    assert (raised.value.status, raised.value.code, raised.value.message) == (status, code, "no")
    assert sum(request.url.path == "/inference/v1/generate" for request in requests) == tries


def test_what_was_submitted_is_given_once() -> None:
    with joined(output) as fleet:
        first, second = (fleet.submit([1], {"seed": seed}, n=2) for seed in (1, 5))
        while (samples := fleet.poll(first)) is None:
            pass
        assert [s.token_ids for s in samples] == [[1], [2]]
        assert [s.token_ids for s in fleet.wait(second)] == [[5], [6]]
        for take in (fleet.poll, fleet.wait):
            with pytest.raises(KeyError, match="no samples have the id 0"):
                take(first)
        fleet.cancel(first)


def countdown(episode: Episode) -> str | float:
    """Says `x` twice."""
    return "x" if len(episode.turns) < 3 else 0.25


@pytest.mark.parametrize("step", [countdown, AsyncMock(side_effect=countdown)])
def test_the_turns_of_an_episode_are_one_session(step: Callable[[Episode], Any]) -> None:
    requests: list[httpx.Request] = []
    with joined(output, requests) as fleet:
        episodes = list(fleet.episodes(["A"], step, {"seed": 8}, n=2))
    assert [each.reward for each in episodes] == [0.25, 0.25]
    (first, second) = sorted(episodes, key=lambda each: each.sample)
    assert first.token_ids == [0, 65, 8, 120, 8, 120, 8]
    assert first.output_mask == [False, False, True, False, True, False, True]
    assert second.turns[2].prompt_token_ids == [0, 65, 9, 120, 9, 120]
    sessions = [each.headers.get("x-session-id") for each in requests if each.url.path == "/inference/v1/generate"]
    assert sorted(map(sessions.count, set(sessions))) == [3, 3]


@pytest.mark.parametrize("reward", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor([0.5])])
def test_a_reward_may_be_numpys_or_torchs(reward: Any) -> None:
    with joined(output) as fleet:
        (episode,) = fleet.episodes([[1]], lambda episode: reward)
    assert (episode.reward, type(episode.reward)) == (0.5, float)


def test_an_episode_that_outgrows_the_context_ends_and_an_environments_error_is_raised() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        return output(body) if len(body["token_ids"]) < 4 else refusal("context_length_exceeded")

    with joined(answer) as fleet:
        (episode,) = fleet.episodes([[1]], lambda episode: [2])
        assert (episode.token_ids, len(episode.turns), episode.reward) == ([1, 0, 2, 0, 2], 2, None)
        with pytest.raises(OutriderError):
            list(fleet.episodes([[1] * 9], lambda episode: None))
        with pytest.raises(LookupError):
            list(fleet.episodes([[1]], Mock(side_effect=LookupError("the tool is gone"))))


def test_of_state_dicts_the_last_stays_on_disk(tmp_path: Path) -> None:
    """Verifiers load it again when they start anew, or when the next one fails."""
    statuses = [200, 400, 503, 200, 200]
    turned = {"a": [[1.0, 2.0], [3.0, 4.0]], "b": [[1.0, 3.0], [2.0, 4.0]]}

    def answer(body: dict[str, Any]) -> httpx.Response:
        file = Path(body["weight_dir"]) / "model.safetensors"
        assert {name: tensor.tolist() for name, tensor in load_file(file).items()} in ({"a": [1.0, 1.0]}, turned)
        status = statuses.pop(0)
        return httpx.Response(200, json={"weight_version": body["weight_version"]}) if status == 200 else refusal("no", status)

    tied = torch.ones(2, requires_grad=True)
    with joined(answer, weights_dir=tmp_path, retries=0) as fleet:
        assert fleet.update_weights({"a": tied, "b": tied}, "one") == "one"
        (first,) = tmp_path.iterdir()
        assert (first / "model.safetensors").stat().st_mode & 0o444 == 0o444, "verifiers may run as another user"
        with pytest.raises(OutriderError):
            fleet.update_weights({"a": tied}, "two")
        assert list(tmp_path.iterdir()) == [first]
        with pytest.raises(OutriderError):
            fleet.update_weights({"a": tied}, "three")
        assert len(list(tmp_path.iterdir())) == 2, "some verifiers may have loaded it"
        square = torch.tensor(turned["a"])
        fleet.update_weights({"a": square, "b": square.t()}, "turned")
        fleet.update_weights({"a": tied}, "four")
        (last,) = tmp_path.iterdir()
        spread = Mock(full_tensor=None, spec=["full_tensor"])
        with pytest.raises(TypeError, match="b is a DTensor"):
            fleet.update_weights({"a": tied, "b": spread})
        assert list(tmp_path.iterdir()) == [last], "nothing stays of what was refused"
    assert last.exists()


def test_adapters_are_models_and_directories_are_named_in_full() -> None:
    """Verifiers run in other directories."""
    sent: list[httpx.Request] = []
    loaded = httpx.Response(200, json={"weight_version": "1"})
    with joined(lambda body: output(body) if "model" in body else loaded, sent) as fleet:
        fleet.update_weights("weights/step_1")
        fleet.load_adapter("sql", "adapters/one")
        assert [sample.token_ids for sample in fleet.generate([[1]], model="sql")] == [[0]]
        assert len(fleet.wait(fleet.submit([1], n=2, model="sql"))) == 2
        (episode,) = fleet.episodes([[1]], lambda episode: 1.0, model="sql")
    weights, adapter, *bodies = [json.loads(request.content) for request in sent if request.content]
    assert weights["weight_dir"] == str(Path.cwd() / "weights/step_1")
    assert adapter == {"lora_name": "sql", "lora_path": str(Path.cwd() / "adapters/one")}
    assert [body["model"] for body in bodies] == ["sql"] * 4
    assert episode.reward == 1.0


def test_a_loop_that_is_left_cancels_the_rest() -> None:
    """The others would never be answered."""
    cancelled: list[int] = []
    numbers = itertools.count()

    async def answer(body: dict[str, Any]) -> httpx.Response:
        if number := next(numbers):
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.append(number)
        return output(body)

    with joined(answer, concurrency=3) as fleet:
        samples = fleet.generate([[1]] * 9)
        assert next(samples).token_ids == [0]
        samples.close()
        fleet.cancel(fleet.submit([1]))
    assert len(cancelled) >= 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_generator_that_the_garbage_collector_ends_stops_nothing() -> None:
    """The collector may run in the fleet's own thread."""
    with joined(output) as fleet:
        samples = fleet.generate([[1]] * 9)
        assert next(samples).token_ids == [0]
        cycle = [samples]
        cycle.append(cycle)  # type: ignore[arg-type]
        del samples, cycle

        step = AsyncMock(side_effect=lambda episode: float(gc.collect() >= 0))
        assert [episode.reward for episode in fleet.episodes([[1]], step)] == [1.0], "the fleet's thread waits for itself"


def test_where_it_would_wait_for_itself_it_says_so() -> None:
    with joined(output) as fleet:

        async def step(episode: Episode) -> float:
            return float(next(fleet.generate([[1]])).token_ids[0])

        with pytest.raises(RuntimeError, match="AsyncFleet"):
            list(fleet.episodes([[1]], step))
        child = os.fork()
        if not child:
            try:
                list(fleet.generate([[1]]))
            except RuntimeError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert fleet.url == "http://fleet"


def test_fleet_has_every_method_of_its_asynchronous_twin() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        methods = {name: each for name, each in vars(kind).items() if name[0] != "_" and callable(each)}
        return {name: list(inspect.signature(each).parameters) for name, each in methods.items()}

    assert public(Fleet) == public(AsyncFleet)
    waiting, weights = {"generate", "episodes", "submit", "poll", "wait", "cancel"}, {"update_weights", "load_adapter"}
    assert public(Fleet).keys() == waiting | weights | {"pause", "resume", "sleep", "wake_up", "stats"}
