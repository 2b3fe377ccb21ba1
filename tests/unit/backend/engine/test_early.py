"""Which of vLLM's steps are taken, and what the runner is told when it goes over."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend.config import Settings
from backend.engine.build import build_config
from backend.engine.counting import StepOrders
from backend.engine.early import EarlySteps
from backend.engine.worker.early import EarlyRunner
from backend.engine.worker.fixed import takes_fixed
from tests.support.processes import demo_models


class Core:
    """Notes which of its steps are taken; a step that begins early is under way until the next one, or `_finish`."""

    def __init__(self, may_be_early: str) -> None:
        answers = iter(may_be_early)
        self.scheduler = SimpleNamespace(is_early=False, may_be_early=lambda: next(answers) == "e")
        self.scheduler.update_from_output = self.update
        self.batch_queue: deque[Any] = deque()
        self.log: list[str] = []

    def update(self, scheduled: Any, outcome: str) -> dict[int, str]:
        self.log.append(outcome)
        return {0: outcome}

    def step(self) -> tuple[dict[int, str], bool]:
        assert not self.batch_queue
        self.log.append("step")
        return {0: "step"}, True

    def step_with_batch_queue(self) -> tuple[dict[int, str] | None, bool]:
        future: Future[str] = Future()
        future.set_result(f"early {len(self.log)}")
        self.batch_queue.appendleft((future, SimpleNamespace(total_num_scheduled_tokens=3), None))
        self.log.append("launch")
        return ({0: self.batch_queue.pop()[0].result()} if len(self.batch_queue) == 2 else None), True

    def log_error_detail(self, scheduled: Any) -> nullcontext[None]:
        return nullcontext()

    def _process_aborts_queue(self) -> None:
        self.log.append("aborts")

    def _attach_weight_version(self, outputs: dict[int, str]) -> None:
        self.log.append("version")


def test_the_step_under_way_is_finished_before_one_that_may_not_begin_early() -> None:
    core = Core("seesse")
    steps = EarlySteps(core)
    assert [steps() for _ in range(6)] == [
        ({0: "step"}, True),
        (None, True),
        ({0: "early 1"}, True),
        ({0: "early 2"}, True),
        ({0: "step"}, True),
        (None, True),
    ]
    assert core.log == ["step", "launch", "launch", "aborts", "early 2", "version", "step", "launch"]


class Launched:
    """In place of vLLM's runner."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        return "ran"


class Runner(EarlyRunner, Launched):
    def __init__(self, requests: dict[str, Any]) -> None:
        self.requests, self.use_async_scheduling = requests, True
        self.input_batch = SimpleNamespace(
            prev_sampled_token_ids="device",
            prev_req_id_to_index={"a": 0},
            sampled_token_ids_cpu="host",
            async_copy_ready_event="event",
            req_id_to_index={"a": 0},
            num_prompt_tokens=np.array([2]),
            token_ids_cpu=np.full((1, 9), -1),
        )


def test_a_runner_that_goes_over_is_told_the_tokens() -> None:
    """Also of a request that is not in the batch: it was preempted, and a token of it is computed anew."""
    states = {
        "a": SimpleNamespace(output_token_ids=[7, -1, -1], prev_num_draft_len=0),
        "b": SimpleNamespace(output_token_ids=[5, -1, -1], prev_num_draft_len=2),
        "c": SimpleNamespace(output_token_ids=[], prev_num_draft_len=0),
    }
    same = states["a"].output_token_ids
    runner = Runner(states)
    runner.input_batch.token_ids_cpu[0, :3] = [1, 2, 7]
    settled = {"a": (3, [8, 9]), "b": (2, [5, 6]), "gone": (1, [1])}
    orders = StepOrders({}, False, settled=settled)
    assert runner.execute_model(SimpleNamespace(outrider=orders)) == "ran"
    assert states["a"].output_token_ids == [7, 8, 9]
    assert states["a"].output_token_ids is same, "the sampler has the same list"
    assert (states["b"].output_token_ids, states["b"].prev_num_draft_len, states["c"].output_token_ids) == ([5, 6], 0, [])
    batch = runner.input_batch
    assert batch.token_ids_cpu[0].tolist() == [1, 2, 7, 8, 9, -1, -1, -1, -1]
    assert batch.prev_sampled_token_ids is batch.prev_req_id_to_index is batch.sampled_token_ids_cpu is None
    assert not runner.use_async_scheduling
    runner.execute_model(SimpleNamespace(outrider=StepOrders({}, False, is_early=True)))
    assert runner.use_async_scheduling


@pytest.mark.parametrize(
    ("mode", "asked", "is_cpu", "early", "fixed"),
    [
        ("auto", None, True, False, True),
        ("auto", None, False, True, True),
        ("sync", True, True, True, True),
        ("sync", False, False, False, True),
        ("off", None, True, False, True),
    ],
)
def test_steps_may_begin_early_where_vllm_can(
    mode: str, asked: bool | None, is_cpu: bool, early: bool, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.engine.early.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    given = {} if asked is None else {"async_scheduling": asked}
    config = build_config(Settings.model_validate({"mode": mode, "verifier": {"engine_args": given}}), demo_models())
    assert config.scheduler_config.async_scheduling == early
    assert takes_fixed(config) == fixed
