"""Pauses the engine, puts the target's weights to sleep, and loads other weights.  Engine process, engine thread.

Requests wait while the scheduler is paused, unless a pause aborts them.  KV cache and prefix cache of the old weights are
thrown away, so requests continue as after a preemption.  Methods raise `NotImplementedError` for what this build of vLLM cannot
do, and `ValueError` for wrong calls.  After either, nothing has changed unless the method says so.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from backend.engine.worker.tensor_transfer import NAME, shapes_in
from backend.fleet.stats import Weights
from backend.models.check import check_same_shapes, check_shapes, is_tied, needed, shapes_of
from backend.models.layout import Shape
from backend.wire.engine import NOT_BEGUN, PAUSED

logger = logging.getLogger(__name__)

UPDATE_PATIENCE_S = 300.0
"""An update by tensors is given up when so long none has come: a trainer that died must not stop the fleet for ever."""


@dataclass
class _Update:
    """An update by tensors that is under way."""

    ends_paused: bool
    """Whether the engine was paused before, or was asked to pause since."""
    received: set[str] = field(default_factory=set)
    """Names of the tensors that have come."""
    touched: bool = False
    """Whether vLLM was given any."""
    progress_at: float = 0.0


class WeightControl:
    """The operations on a verifier's weights that gateways may call.  `target_dir`: the directory loaded at the start.

    `version` and `update` name the new weights; see `Weights`.
    """

    def __init__(self, core: EngineCore, target_dir: str, can_sleep: bool) -> None:
        self._core = core
        self._target_dir = target_dir
        self.loaded = self._from_disk = Weights()
        self.can_sleep = can_sleep
        self.on_changed: Callable[[], None] = lambda: None
        """Called when the engine pauses (before anything slow), resumes, or has other weights."""
        self.on_outputs: Callable[[dict[int, EngineCoreOutputs] | None], None] = lambda outputs: None
        """Gets the outputs of steps under way at a pause, and the ends of requests that it aborts."""
        self.on_renewed: Callable[[], None] = lambda: None
        """Called when other weights have been loaded."""
        self.on_reading: Callable[[], None] = lambda: None
        """Called before an adapter is read, which may take long from a slow disk."""
        self._adapters_read: set[int] = set()
        """Numbers of adapters that may have computed what is cached."""
        self._draining: Future[None] | None = None
        self._clears = False
        self._update: _Update | None = None
        core.set_weight_version(self.loaded.version)

    @property
    def is_paused(self) -> bool:
        """Whether the engine computes nothing.  A pause of mode `wait` begins when the running requests have ended."""
        draining = self._core.scheduler.pause_state == PauseState.PAUSED_NEW and self._core.scheduler.has_unfinished_requests()
        return bool(self._core.is_sleeping()) and not draining

    # Pausing

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> Future[None] | None:
        """Pauses: new requests wait.  Present requests end (`abort`), finish (`wait`), or stop where they are (`keep`).

        The future of `wait` is done when all have finished.  `clear_cache` empties the prefix cache, except with `keep`.
        During an update by tensors, and while weights or KV cache sleep, `wait` is `keep`.
        """
        if self._update is not None:
            self._update.ends_paused = True
        elif mode == "wait" and not self._core.model_executor.is_sleeping:
            self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._draining = self._draining or Future()
            self._clears = clear_cache
            draining = self._draining
            self.look()
            return draining
        self._pause()
        if mode == "abort":
            self._end(None, RequestStatus.FINISHED_ABORTED, FinishReason.ABORT, PAUSED)
            self._core._finish_pause(clear_cache)
        return None

    def look(self) -> None:
        """Ends a pause's wait when nothing runs any more, and an update by tensors of which nothing more comes."""
        if self._update is not None and time.monotonic() - self._update.progress_at > UPDATE_PATIENCE_S:
            self._give_up(self._update)
        if self._draining is not None and not self._core.scheduler.has_unfinished_requests():
            draining, self._draining = self._draining, None
            self._pause()
            self._core._finish_pause(self._clears)
            draining.set_result(None)

    def resume(self) -> None:
        """Ends a pause."""
        self._refuse_during_update()
        if self._core.model_executor.is_sleeping:
            raise ValueError("wake it up first")
        self._read_adapters()
        self._core.resume_scheduler()
        self._end_wait()
        self.on_changed()

    def _end_wait(self) -> None:
        """A pause that waited for requests is over before they have ended."""
        if self._draining is not None:
            self._draining.set_exception(ValueError("resumed before all requests had ended"))
            self._draining = None

    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Level 0 only pauses.  Level 1 also moves the weights to host memory and frees the KV cache; 2 drops both.

        Present requests are kept, or aborted with `mode` `abort`.
        """
        if level not in (0, 1, 2):
            raise ValueError("level must be 0, 1 or 2")
        if level and not self.can_sleep:
            raise NotImplementedError(
                "this verifier was not started with vLLM's sleep mode: it needs CUDA and verifier.engine_args.enable_sleep_mode"
            )
        self._refuse_during_update()
        self.pause(mode)
        self._core.sleep(level, "keep")

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undoes `sleep`, for all or only the `tags` (`weights`, `kv_cache`); returns whether requests go on."""
        if set(tags or ()) - {"weights", "kv_cache"}:
            raise ValueError("tags are weights and kv_cache")
        self._refuse_during_update()
        sleeps = self._core.model_executor.is_sleeping
        if tags == ["weights"] and self.can_sleep and self._core.is_sleeping() and not sleeps:
            # It was started while others slept, and is only paused.  Their requests do not go on yet.
            return False
        # With other tags, vLLM logs a warning if only the scheduler has to be woken.
        awake = self._core.wake_up(tags if sleeps else ["scheduling"])
        if awake:
            self._read_adapters()
            self._end_wait()
        self.on_changed()
        return bool(awake)

    # Weights from a directory

    def reload_weights(self, path: str | None = None, version: str | None = None, update: int | None = None) -> None:
        """Loads a checkpoint of the same architecture from `path`, or again from the directory last loaded.

        The engine stays paused if it was; a pause that waits for requests begins.  Its weights must not sleep; its KV cache
        may.  If loading fails although all shapes fit, the earlier weights are loaded again.  If that fails too, the process
        ends: a half-loaded model must not answer.
        """
        self.refuse_unless_whole()
        wanted = path or self._directory
        check_same_shapes(wanted, self._shapes, self._tied)
        was_paused = self._stand_still()
        try:
            self._load(wanted)
        except Exception as error:
            logger.exception("loading weights failed; loading the earlier ones again")
            self._fall_back(was_paused)
            raise ValueError(f"the weights could not be loaded: {error}") from error
        self._renewed(self._called(version, update, wanted), was_paused)
        self._from_disk = self.loaded

    def catch_up(self, path: str, version: str, update: int) -> None:
        """Loads the weights of the fleet's `update`, unless this verifier has that update or a later one."""
        if self.loaded.update < update:
            self.reload_weights(path, version, update)

    # Weights as tensors, over the wire or by vLLM's own transfer engines

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects vLLM's transfer engine, if `verifier.engine_args.weight_transfer_config` names one, to a trainer."""
        # It may wait long for the trainer.  A paused verifier is not taken for dead meanwhile.
        was_paused = self._stand_still()
        try:
            self._transfer("init_weight_transfer_engine", init_info=init_info)
        finally:
            self._go_on(was_paused)

    def start_weight_update(self) -> None:
        """Pauses the engine and begins an update by tensors."""
        self.refuse_unless_whole()
        self._update = _Update(self._stand_still())
        self._go_on_with(self._update, "start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Loads some tensors: safetensors bytes, or a description of what vLLM's transfer engine should receive.

        After bytes that do not fit, the update goes on.  If vLLM fails, the last weights from a directory are loaded again.
        """
        update = self._require_update()
        if self._takes_bytes != isinstance(update_info, bytes):
            raise ValueError(
                "tensors come as safetensors' bytes; verifier.engine_args.weight_transfer_config names no other way"
                if self._takes_bytes
                else "tensors come through vLLM's transfer engine: send its update_info"
            )
        if isinstance(update_info, bytes):
            sent = shapes_in(update_info)
            found = needed(sent, self._tied)
            check_shapes({name: self._shapes.get(name) for name in found}, found)
            # vLLM counts what has come of a layer: a tensor that is sent again would make it seem complete.
            again = found.keys() & update.received
            update_info = {"tensors": update_info, "skipped": sorted(again | (sent.keys() - found.keys()))}
            update.received |= found.keys()
        update.touched = True
        self._go_on_with(update, "update_weights", update_info=update_info)

    def finish_weight_update(self, version: str | None = None, update: int | None = None) -> None:
        """Ends an update by tensors; resumes, unless paused before.  On failure, the last weights from a directory are back."""
        done = self._require_update()
        missing = sorted(self._shapes.keys() - done.received) if self._takes_bytes else []
        if missing:
            self._give_up(done)
            now = "the last from a directory are back" if done.touched else "nothing has changed"
            raise ValueError(f"{len(missing)} tensors did not come, {missing[0]} for one; {now}")
        self._go_on_with(done, "finish_weight_update")
        self._update = None
        self._renewed(self._called(version, update, None), done.ends_paused)

    def _require_update(self) -> _Update:
        if self._update is None:
            raise ValueError(NOT_BEGUN)
        return self._update

    def _go_on_with(self, update: _Update, method: str, **arguments: Any) -> None:
        """Calls one of vLLM's methods for an update by tensors; gives the update up if that fails."""
        try:
            self._transfer(method, **arguments)
        except Exception:
            self._give_up(update)
            raise
        update.progress_at = time.monotonic()

    def _give_up(self, update: _Update) -> None:
        """Ends a failed update by tensors."""
        logger.error("an update of the weights by tensors is given up")
        self._update = None
        self._fall_back(update.ends_paused, update.touched)

    def _refuse_during_update(self) -> None:
        """Raises `ValueError` while an update by tensors is under way."""
        if self._update is not None:
            raise ValueError(
                f"a weight update is under way; finish_weight_update ends it, or {UPDATE_PATIENCE_S:g} s without tensors"
            )

    def refuse_unless_whole(self) -> None:
        """Raises `ValueError` while an update by tensors is under way, or the weights sleep."""
        self._refuse_during_update()
        # The KV cache may sleep on: after level 2, weights must be there before `wake_up` lets requests go on.
        if "weights" in self._core.model_executor.sleeping_tags:
            raise ValueError("wake the weights up first")

    # Adapters.  vLLM reads one that a step needs within the step, where a directory that is gone would end the engine.

    def add_lora(self, adapter: LoRARequest) -> bool:
        """Loads an adapter; if in place of one of its name and directory, discards what that one has computed."""
        again = adapter.load_inplace and adapter.lora_int_id in self._adapters_read
        self.on_reading()
        added = bool(self._core.add_lora(adapter))
        self._adapters_read.add(adapter.lora_int_id)
        if again:
            # Prefix caches tell adapters apart by name and directory, and both are unchanged.
            self._core.reset_prefix_cache(reset_running_requests=True)
        return added

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter.  One that requests use stays loaded: vLLM drops it when it needs the room."""
        used = any(each.lora_int_id == lora_id for each in self._adapters())
        return used or bool(self._core.remove_lora(lora_id))

    def read_adapter(self, adapter: LoRARequest) -> None:
        """Loads a new request's adapter; raises what vLLM raises.  While that is impossible, it waits for `_read_adapters`."""
        can = self._update is None and not self._core.model_executor.is_sleeping
        # Adding one that is loaded would put it into the device's slot, from which the next step takes it again.
        if can and adapter.lora_int_id not in self._core.list_loras():
            self.add_lora(adapter)

    def _adapters(self) -> list[LoRARequest]:
        """Those that requests use."""
        used = [each.lora_request for each in self._core.scheduler.requests.values() if each.lora_request is not None]
        return list({each.lora_int_id: each for each in used}.values())

    def _read_adapters(self) -> None:
        """Loads the adapters of present requests before these go on; those whose adapter cannot be read end with an error."""
        for adapter in self._adapters():
            try:
                self._core.add_lora(adapter)
            except Exception as error:
                logger.warning("an adapter cannot be loaded any more: %s: %s", type(error).__name__, error)
                number, requests = adapter.lora_int_id, self._core.scheduler.requests.items()
                theirs = [name for name, each in requests if each.lora_request and each.lora_request.lora_int_id == number]
                self._end(theirs, RequestStatus.FINISHED_ERROR, FinishReason.ERROR)

    @cached_property
    def _shapes(self) -> Mapping[str, Shape]:
        """Shapes of the tensors in the checkpoint of the start that every checkpoint must have."""
        return needed(shapes_of(self._target_dir), self._tied)

    @cached_property
    def _tied(self) -> bool:
        return is_tied(self._target_dir)

    @property
    def _takes_bytes(self) -> bool:
        """Whether tensors come over our own wire, and not by a transfer engine of vLLM's."""
        return bool(self._core.vllm_config.weight_transfer_config.backend == NAME)

    @property
    def _directory(self) -> str:
        return self._from_disk.path or self._target_dir

    def _called(self, version: str | None, update: int | None, path: str | None) -> Weights:
        number = self.loaded.update + 1 if update is None else update
        return Weights(number, version if version is not None else str(number), path)

    def _load(self, path: str) -> None:
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def _fall_back(self, stays_paused: bool, touched: bool = True) -> None:
        """Ends a failed load.  If it has `touched` the weights, loads the last ones from a directory, or ends the process."""
        try:
            self._core.collective_rpc("abandon_weight_update")
            if touched:
                self._load(self._directory)
        except Exception as error:
            raise SystemExit("neither the new nor the earlier weights can be loaded") from error
        if touched:
            self._renewed(self._from_disk, stays_paused)
        else:
            self._go_on(stays_paused)

    def _transfer(self, method: str, **arguments: Any) -> None:
        try:
            self._core.collective_rpc(method, kwargs=arguments)
        except (TypeError, RuntimeError, OSError) as error:
            raise ValueError(f"{method}: {error}") from error

    def _renewed(self, loaded: Weights, stays_paused: bool) -> None:
        """After other weights were loaded: drops everything that the old ones computed."""
        self.loaded = loaded
        self._core.set_weight_version(loaded.version)
        self._core._reset_caches(reset_running_requests=True)
        self.on_renewed()
        self._go_on(stays_paused)

    def _go_on(self, stays_paused: bool) -> None:
        if not stays_paused:
            self._read_adapters()
            self._core.resume_scheduler()
        self.on_changed()

    def _pause(self) -> None:
        """Pauses the scheduler and finishes the steps that vLLM's pipelining has under way."""
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            outputs, executed = self._core.step_fn()
            self.on_outputs(outputs)
            self._core.post_step(executed)
        self.on_changed()

    def _stand_still(self) -> bool:
        """Pauses for an update, which also answers a pause that waits for requests; says whether there was a pause."""
        was_paused = bool(self._core.is_sleeping())
        self._pause()
        draining, self._draining = self._draining, None
        if draining is not None:
            draining.set_result(None)
        return was_paused

    def _end(
        self, request_ids: Iterable[str] | None, status: RequestStatus, reason: FinishReason, stop_reason: str | None = None
    ) -> None:
        """Ends requests, all of them if there are no ids, and tells their clients."""
        ended: dict[int, EngineCoreOutputs] = defaultdict(EngineCoreOutputs)
        for request in self._core.scheduler.finish_requests(request_ids, status):
            output = EngineCoreOutput(request.request_id, [], finish_reason=reason, stop_reason=stop_reason)
            ended[request.client_index].outputs.append(output)
        self.on_outputs(ended)
