"""Steps a verifier's engine core, plain steps of a remote mode early.  Engine process, engine thread.

A step begins *early* if it is launched before the outcome of the one before it is known, as vLLM's asynchronous scheduling does
in mode `off`.  The device then need not wait for the scheduler.  A step that verifies drafts, or asks for them, needs the text
before it: going over to such steps first finishes the early one under way.

vLLM cannot go over.  So its engine is built for asynchronous scheduling, and `EarlySteps` replaces its choice of a step.  The
runner's part is `worker/early.py`.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine.core import EngineCore


def can_be_early(config: VllmConfig, given: bool | None) -> bool:
    """Whether the plain steps of a remote mode may begin early; `given`: vLLM's argument `async_scheduling`, if any.

    On a CPU only if asked for: host and device are one.  Not with recurrent layers, whose state vLLM keeps otherwise then, nor
    with stages, for which vLLM has other queues.
    """
    wanted = not current_platform.is_cpu() if given is None else given
    return wanted and not config.model_config.has_inner_state and config.parallel_config.pipeline_parallel_size == 1


class EarlySteps:
    """In place of `EngineCore.step_fn`; the scheduler is a `DraftingScheduler`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler: Any = core.scheduler

    def __call__(self) -> tuple[Any, bool]:
        """Takes a step.  Returns its outputs, and whether it ran the target; None for outputs if a step was only launched."""
        self._scheduler.is_early = self._scheduler.may_be_early()
        step: Callable[[], tuple[Any, bool]] = self._core.step
        if self._scheduler.is_early:
            step = self._core.step_with_batch_queue
        elif self._core.batch_queue:
            step = self._finish
        return step()

    def _finish(self) -> tuple[Any, bool]:
        """Waits for the step under way.  (vLLM 0.32, the second half of `EngineCore.step_with_batch_queue`.)"""
        core: Any = self._core
        future, scheduled, launched = core.batch_queue.pop()
        with core.log_error_detail(scheduled):
            outcome = future.result()
            if outcome is None:
                # Raises what the step has failed with.
                launched.result()
        core._process_aborts_queue()
        outputs = self._scheduler.update_from_output(scheduled, outcome)
        core._attach_weight_version(outputs)
        return outputs, scheduled.total_num_scheduled_tokens > 0
