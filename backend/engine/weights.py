"""The target's weights while the engine lives: sleep, wake up, load others.  Engine process, engine thread.

Requests are kept, whatever happens: the scheduler is paused, so that they wait, and what was computed with the old weights (KV
of running requests, prefix cache) is thrown away, so that they go on as if they had been preempted.  All of it is vLLM's own
API; what this build of vLLM cannot do is a `NotImplementedError`, what was asked for wrongly a `ValueError`, and neither has
changed anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore

from backend.models.head_config import CheckpointError
from backend.models.tensor_files import TensorFiles

logger = logging.getLogger(__name__)


class WeightControl:
    """What a gateway may do with a verifier's weights.  `target_dir` is what was loaded at the start."""

    def __init__(self, core: EngineCore, target_dir: str, can_sleep: bool) -> None:
        self._core = core
        self._path = target_dir
        self.can_sleep = can_sleep
        self.on_begin: Callable[[], None] = lambda: None
        """Called when the engine is paused, before what may take long."""
        self.on_outputs: Callable[[dict[int, EngineCoreOutputs] | None], None] = lambda outputs: None
        """Takes what steps that were under way still bring."""
        self.on_renewed: Callable[[], None] = lambda: None
        """Called when other weights have been loaded."""

    @property
    def is_paused(self) -> bool:
        """Whether requests wait."""
        return bool(self._core.is_sleeping())

    def sleep(self, level: int = 1) -> None:
        """Level 0 only pauses; 1 moves the weights to the host's memory and gives the KV cache's back; 2 drops both."""
        if level not in (0, 1, 2):
            raise ValueError("level must be 0, 1 or 2")
        if level and not self.can_sleep:
            raise NotImplementedError(
                "this verifier was not started with vLLM's sleep mode: it needs CUDA and verifier.engine_args.enable_sleep_mode"
            )
        self._pause()
        self._core.sleep(level, "keep")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undoes `sleep`, all of it or the `tags` (`weights`, `kv_cache`); True when requests go on."""
        if set(tags or ()) - {"weights", "kv_cache"}:
            raise ValueError("tags are weights and kv_cache")
        # vLLM warns where nothing but the scheduler is to be woken.
        awake = self._core.wake_up(tags if self._core.model_executor.is_sleeping else ["scheduling"])
        return bool(awake)

    def reload_weights(self, path: str | None = None) -> None:
        """Loads a checkpoint of the same architecture from `path`, or from where the present one came from.

        Keeps the engine paused if it was; it must not sleep deeper than that.  Should loading fail although all shapes fit, the
        earlier weights are loaded again, and if that fails too the process ends: half a model must not answer.
        """
        wanted = path or self._path
        check_same_shapes(wanted, self._path)
        if self._core.model_executor.is_sleeping:
            raise ValueError("wake the weights up first")
        was_paused = self.is_paused
        self._pause()
        try:
            self._load(wanted)
        except Exception as error:
            logger.exception("loading weights failed; loading the earlier ones again")
            self._load_or_die()
            raise ValueError(f"the weights could not be loaded: {error}") from error
        finally:
            self._core._reset_caches(reset_running_requests=True)
            self.on_renewed()
            if not was_paused:
                self._core.resume_scheduler()
        self._path = wanted

    def _load(self, path: str) -> None:
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def _load_or_die(self) -> None:
        try:
            self._load(self._path)
        except Exception as error:
            raise SystemExit("neither the new nor the earlier weights can be loaded") from error

    def _pause(self) -> None:
        """Requests wait from here on; steps under way (vLLM's own pipelining) are finished first."""
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            outputs, executed = self._core.step_fn()
            self.on_outputs(outputs)
            self._core.post_step(executed)
        self.on_begin()


def check_same_shapes(path: str, present: str) -> None:
    """Raises `ValueError` unless both directories hold tensors of the same names and shapes."""
    if not Path(path).is_dir():
        raise ValueError("no such directory on the verifier's machine")
    try:
        new, old = TensorFiles(path), TensorFiles(present)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    differing = sorted(name for name in new.tensors.keys() | old.tensors.keys() if new.shape(name) != old.shape(name))
    if differing:
        shown = ", ".join(f"{n}: {_shape(new, n)} instead of {_shape(old, n)}" for n in differing[:3])
        raise ValueError(f"other tensors than the model has: {shown}")


def _shape(files: TensorFiles, name: str) -> str:
    found = files.shape(name)
    return "none" if found is None else str(list(found))
