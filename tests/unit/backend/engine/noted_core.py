"""An engine core that notes what is asked of it, and checkpoints of a few numbers.  Tests only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save, save_file
from vllm.v1.core.sched.interface import PauseState

from backend.engine.worker.tensor_transfer import NAME


class Executor:
    """Stands for vLLM's executor."""

    sleeping_tags: frozenset[str] = frozenset()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)


class Core:
    """Stands for vLLM's core and its scheduler."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.scheduler = self
        self.model_executor = Executor()
        self.batch_queue: list[str] = []
        self.broken: set[str] = set()
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Any] = {}
        self.unreadable: set[int] = set()
        self.loras: set[int] = set()
        self.skipped: list[str] = []
        self.version = ""
        self.transferring = False
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=NAME))

    def is_sleeping(self) -> bool:
        return self.model_executor.is_sleeping or self.pause_state != PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def set_weight_version(self, version: str) -> None:
        self.version = version

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests) and self.pause_state != PauseState.PAUSED_ALL

    def finish_requests(self, ids: list[str] | None, status: Any) -> list[Any]:
        return [self.requests.pop(each) for each in (list(self.requests) if ids is None else ids)]

    def add_lora(self, adapter: Any) -> bool:
        self.log.append(f"adapter {adapter.lora_int_id}")
        if adapter.lora_int_id in self.unreadable:
            raise OSError("gone")
        return True

    def list_loras(self) -> set[int]:
        return self.loras

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.log.append("discard")

    def remove_lora(self, lora_id: int) -> bool:
        self.log.append(f"remove {lora_id}")
        return True

    def _finish_pause(self, clear_cache: bool) -> None:
        self.log.append(f"clear {clear_cache}")

    def resume_scheduler(self) -> None:
        self.log.append("resume")
        self.pause_state = PauseState.UNPAUSED

    def step_fn(self) -> tuple[Any, bool]:
        assert self.pause_state != PauseState.UNPAUSED
        self.log.append(f"step {self.batch_queue.pop()}")
        return {}, True

    def post_step(self, executed: bool) -> None:
        pass

    def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep"
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None) -> bool:
        self.log.append(("wake", tags))
        self.pause_state = PauseState.UNPAUSED
        return True

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        if method != "reload_weights":
            self.log.append(method)
            if method == "update_weights" and kwargs is not None and "skipped" in kwargs["update_info"]:
                self.skipped = kwargs["update_info"]["skipped"]
            # vLLM's worker: one session at a time, which a part that fails ends.
            if method == "start_weight_update" and self.transferring:
                raise RuntimeError("already active")
            self.transferring = method in ("start_weight_update", "update_weights")
            if method in self.broken:
                self.transferring &= method == "finish_weight_update"
                raise RuntimeError("torn")
            return
        assert kwargs is not None
        assert not self.transferring
        path = Path(kwargs["weights_path"]).name
        self.log.append(f"load {path}")
        if path in self.broken:
            raise RuntimeError("torn")

    def _reset_caches(self, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.log.append("reset")


def checkpoint(directory: Path, **shapes: tuple[int, ...]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    return str(directory)


def asked(request_id: str, adapter: int | None = None) -> SimpleNamespace:
    lora = None if adapter is None else SimpleNamespace(lora_int_id=adapter, load_inplace=False)
    return SimpleNamespace(request_id=request_id, client_index=3, lora_request=lora)


def tensors(**shapes: tuple[int, ...]) -> bytes:
    return save({name: torch.zeros(shape) for name, shape in shapes.items()})
