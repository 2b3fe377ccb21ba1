"""Which of vLLM's steps are taken.  (What the runner is told when it goes over: `tests/lossless/test_early.py`.)"""

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from backend.config import Settings
from backend.engine.build import build_config
from backend.engine.early import EarlySteps
from backend.engine.worker.fixed import takes_fixed
from tests.support.processes import demo_models


def test_the_step_under_way_is_finished_before_one_that_may_not_begin_early() -> None:
    core = MagicMock(batch_queue=deque())
    core.scheduler.may_be_early.side_effect = [each == "e" for each in "seesse"]
    core.scheduler.update_from_output.side_effect = lambda scheduled, outcome: {0: outcome}
    core.step.return_value = {0: "step"}, True

    def launch() -> tuple[dict[int, str] | None, bool]:
        """It is under way until the next one, or until it is finished."""
        future: Future[str] = Future()
        future.set_result(f"early {core.step_with_batch_queue.call_count}")
        core.batch_queue.appendleft((future, SimpleNamespace(total_num_scheduled_tokens=3), None))
        return ({0: core.batch_queue.pop()[0].result()} if len(core.batch_queue) == 2 else None), True

    core.step_with_batch_queue.side_effect = launch
    steps = EarlySteps(core)
    assert [steps() for _ in range(6)] == [
        ({0: "step"}, True),
        (None, True),
        ({0: "early 1"}, True),
        ({0: "early 2"}, True),
        ({0: "step"}, True),
        (None, True),
    ]
    called = [name for name, _, _ in core.mock_calls if not name.endswith(("may_be_early", "__"))]
    launched = "step_with_batch_queue"
    finished = ["log_error_detail", "_process_aborts_queue", "scheduler.update_from_output", "_attach_weight_version"]
    assert called == ["step", launched, launched, *finished, "step", launched]


@pytest.mark.parametrize(
    ("mode", "asked", "is_cpu", "early"),
    [
        ("auto", None, True, False),
        ("auto", None, False, True),
        ("sync", True, True, True),
        ("sync", False, False, False),
        ("off", None, True, False),
    ],
)
def test_steps_may_begin_early_where_vllm_can(
    mode: str, asked: bool | None, is_cpu: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backend.engine.early.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    given = {} if asked is None else {"async_scheduling": asked}
    config = build_config(Settings.model_validate({"mode": mode, "verifier": {"engine_args": given}}), demo_models())
    assert config.scheduler_config.async_scheduling == early
    assert takes_fixed(config)
