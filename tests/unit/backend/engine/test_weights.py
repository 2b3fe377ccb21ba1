"""Exchanging a target's weights: what is refused, in which order things happen, and what is left after a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from backend.engine import weights
from backend.engine.counting import Counters
from backend.engine.weights import WeightControl
from backend.engine.worker.tensor_transfer import NAME, Tensors, WireTransfer
from backend.fleet import VERSIONS, Verified, VerifierStats
from backend.fleet.stats import Weights
from backend.wire.engine import PAUSED


class Core:
    """An engine core that notes what is asked of it."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused = False
        self.scheduler = self
        self.model_executor = self
        self.sleeping_tags: set[str] = set()
        self.batch_queue: list[str] = ["a", "b"]
        self.broken: set[str] = set()
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Any] = {}
        self.unreadable: set[int] = set()
        self.loras: set[int] = set()
        self.skipped: list[str] = []
        self.version = ""
        self.transferring = False
        self.vllm_config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=NAME))

    @property
    def is_sleeping(self) -> Any:
        # vLLM's core has a method and its executor a property of this name.
        return _Callable(bool(self.sleeping_tags) or self.paused, bool(self.sleeping_tags))

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state
        self.paused = state != PauseState.UNPAUSED

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
        self.paused = False
        self.pause_state = PauseState.UNPAUSED

    def step_fn(self) -> tuple[Any, bool]:
        assert self.paused
        self.log.append(f"step {self.batch_queue.pop()}")
        return {}, True

    def post_step(self, executed: bool) -> None:
        pass

    def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep"
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None) -> bool:
        self.log.append(("wake", tags))
        self.paused = False
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


class _Callable(int):
    def __new__(cls, whole: bool, deep: bool) -> _Callable:
        made = super().__new__(cls, deep)
        made.whole = whole  # type: ignore[attr-defined]
        return made

    def __call__(self) -> bool:
        return bool(self.whole)  # type: ignore[attr-defined]


def checkpoint(directory: Path, **shapes: tuple[int, ...]) -> str:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    return str(directory)


def asked(request_id: str, adapter: int | None = None) -> SimpleNamespace:
    lora = None if adapter is None else SimpleNamespace(lora_int_id=adapter, load_inplace=False)
    return SimpleNamespace(request_id=request_id, client_index=3, lora_request=lora)


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def control(core: Core, tmp_path: Path) -> WeightControl:
    control = WeightControl(core, checkpoint(tmp_path / "old", a=(2, 3), b=(4,)), can_sleep=False)
    control.on_changed = lambda: core.log.append("begin" if control.is_paused else "on")
    control.on_renewed = lambda: core.log.append("renewed")
    return control


def test_weights_are_loaded_between_steps_and_requests_go_on(core: Core, control: WeightControl, tmp_path: Path) -> None:
    control.reload_weights(checkpoint(tmp_path / "new", a=(2, 3), b=(4,)))
    assert core.log == ["step b", "step a", "begin", "load new", "reset", "renewed", "resume", "on"]
    assert not control.is_paused
    core.log.clear()
    # The next time "the same again" means these.
    control.reload_weights()
    assert core.log == ["begin", "load new", "reset", "renewed", "resume", "on"]


def test_a_paused_verifier_stays_paused(core: Core, control: WeightControl) -> None:
    control.sleep(0)
    control.reload_weights()
    assert control.is_paused
    assert control.wake_up()
    assert core.log[-2:] == [("wake", ["scheduling"]), "on"]
    assert not control.is_paused


@pytest.mark.parametrize(
    ("shapes", "said"),
    [({"a": (2, 3)}, "b: none instead of"), ({"a": (2, 3), "b": (5,)}, "b: "), ({"a": (2, 3), "b": (4,), "c": (1,)}, "c: ")],
)
def test_other_shapes_are_refused_before_anything_happens(
    core: Core, control: WeightControl, tmp_path: Path, shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        control.reload_weights(checkpoint(tmp_path / "new", **shapes))
    with pytest.raises(ValueError, match="no such directory"):
        control.reload_weights(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no [.]safetensors"):
        control.reload_weights(str(tmp_path / "empty"))
    assert core.log == []


def test_half_loaded_weights_are_replaced_by_the_earlier_ones(core: Core, control: WeightControl, tmp_path: Path) -> None:
    new = checkpoint(tmp_path / "new", a=(2, 3), b=(4,))
    core.batch_queue.clear()
    core.broken = {"new"}
    with pytest.raises(ValueError, match="could not be loaded: torn"):
        control.reload_weights(new)
    assert core.log == ["begin", "load new", "abandon_weight_update", "load old", "reset", "renewed", "resume", "on"]
    core.log.clear()
    core.broken = {"new", "old"}
    # The process ends: Ray starts another.
    with pytest.raises(SystemExit):
        control.reload_weights(new)


def test_sleep_needs_an_engine_that_can(core: Core, control: WeightControl) -> None:
    for level in (1, 2):
        with pytest.raises(NotImplementedError, match="enable_sleep_mode"):
            control.sleep(level)
    for level in (-1, 3):
        with pytest.raises(ValueError, match="level"):
            control.sleep(level)
    with pytest.raises(ValueError, match="tags"):
        control.wake_up(["everything"])
    assert core.log == []
    able = WeightControl(core, "", can_sleep=True)
    able.sleep(2)
    assert core.log[-1] == "sleep 2"
    core.sleeping_tags = {"weights", "kv_cache"}
    able.wake_up(["weights"])
    assert core.log[-1] == ("wake", ["weights"])


def test_weights_that_are_awake_are_updated_while_the_kv_cache_sleeps(core: Core, control: WeightControl) -> None:
    """A trainer on the same GPU has room for both only afterwards."""
    core.batch_queue.clear()
    core.paused = True
    core.sleeping_tags = {"weights", "kv_cache"}
    for call in (control.reload_weights, control.start_weight_update):
        with pytest.raises(ValueError, match="wake the weights up"):
            call()
    core.sleeping_tags = {"kv_cache"}
    control.reload_weights()
    control.start_weight_update()
    control.update_weights(tensors(a=(2, 3), b=(4,)))
    with pytest.raises(ValueError, match="under way"):
        control.wake_up()
    control.finish_weight_update()
    assert "resume" not in core.log
    with pytest.raises(ValueError, match="wake it up"):
        control.resume()


def test_versions_are_counted_or_named_and_an_old_update_is_not_loaded_again(
    core: Core, control: WeightControl, tmp_path: Path
) -> None:
    new = checkpoint(tmp_path / "new", a=(2, 3), b=(4,))
    assert (control.loaded, core.version) == (Weights(0, "0", None), "0")
    control.reload_weights(new)
    assert (control.loaded, core.version) == (Weights(1, "1", new), "1")
    control.reload_weights(new, "step-7", 5)
    assert core.version == "step-7"
    core.log.clear()
    control.catch_up(str(tmp_path / "old"), "4", 5)
    assert core.log == []
    control.catch_up(str(tmp_path / "old"), "6", 6)
    assert control.loaded == Weights(6, "6", str(tmp_path / "old"))


def test_the_directory_of_before_may_be_gone(core: Core, control: WeightControl, tmp_path: Path) -> None:
    control.reload_weights(checkpoint(tmp_path / "one", a=(2, 3), b=(4,)))
    (tmp_path / "one" / "model.safetensors").unlink()
    control.reload_weights(checkpoint(tmp_path / "two", a=(2, 3), b=(4,)))
    with pytest.raises(ValueError, match="other tensors"):
        control.reload_weights(checkpoint(tmp_path / "three", a=(2, 3)))


def test_a_pause_keeps_aborts_or_waits(core: Core, control: WeightControl) -> None:
    sent: list[Any] = []
    control.on_outputs = sent.append
    core.batch_queue.clear()
    core.requests = {"one": asked("one")}
    control.pause("keep")
    assert (core.log, core.requests != {}, control.is_paused) == (["begin"], True, True)
    control.resume()
    waiting = control.pause("wait")
    assert waiting is not None
    control.look()
    assert (waiting.done(), control.is_paused) == (False, False), "it goes on"
    core.requests = {}
    control.look()
    assert (waiting.done(), control.is_paused, core.log[-1]) == (True, True, "clear True")
    control.resume()
    core.requests = {"one": asked("one")}
    control.pause("abort", False)
    ((index, outputs),) = sent[-1].items()
    (output,) = outputs.outputs
    assert (index, output.request_id, output.finish_reason, output.stop_reason) == (3, "one", FinishReason.ABORT, PAUSED)
    assert core.log[-1] == "clear False"
    with pytest.raises(ValueError, match="mode"):
        control.pause("never")


@pytest.mark.parametrize("end", ["resume", "wake_up"])
def test_a_pause_that_is_over_before_its_requests_have_ended_does_not_come_back(
    core: Core, control: WeightControl, end: str
) -> None:
    core.batch_queue.clear()
    core.requests = {"one": asked("one")}
    waiting = control.pause("wait")
    assert waiting is not None
    getattr(control, end)()
    core.requests = {}
    control.look()
    assert not control.is_paused
    assert waiting.exception() is not None


def update_by_tensors(control: WeightControl, pause: Callable[[], Any]) -> None:
    control.start_weight_update()
    pause()
    control.update_weights(tensors(a=(2, 3), b=(4,)))
    control.finish_weight_update()


@pytest.mark.parametrize("mode", weights.PAUSE_MODES)
def test_an_update_leaves_a_pause_alone(core: Core, control: WeightControl, mode: str) -> None:
    def pause() -> None:
        core.requests = {"one": asked("one")}
        control.pause(mode)

    def by_tensors() -> None:
        update_by_tensors(control, control.look)

    for update in (control.reload_weights, by_tensors):
        core.batch_queue.clear()
        core.requests = {"one": asked("one")}
        answered = control.pause(mode)
        update()
        assert answered is None or answered.done(), "a pause that waits begins with the update"
        control.look()
        assert control.is_paused
        control.resume()
    update_by_tensors(control, pause)
    assert control.is_paused
    control.resume()
    assert not control.is_paused


def tensors(**shapes: tuple[int, ...]) -> bytes:
    return save({name: torch.zeros(shape) for name, shape in shapes.items()})


def test_tensors_wait_in_host_memory_for_the_rest_of_their_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    loaded: list[tuple[str, torch.Tensor]] = []
    engine = WireTransfer.__new__(WireTransfer)
    engine.device, engine.model = torch.device("cuda"), SimpleNamespace(load_weights=loaded.extend)
    engine.receive_weights(Tensors(tensors(a=(2, 3)), []))
    assert [(name, tensor.device.type) for name, tensor in loaded] == [("a", "cpu")]


def test_tensors_come_in_parts(core: Core, control: WeightControl) -> None:
    core.batch_queue.clear()
    with pytest.raises(ValueError, match="start_weight_update"):
        control.update_weights(tensors(a=(2, 3)))
    with pytest.raises(ValueError, match="start_weight_update"):
        control.finish_weight_update()
    control.start_weight_update()
    calls: list[Callable[[], None]] = [control.resume, control.reload_weights, control.start_weight_update]
    for call in calls:
        with pytest.raises(ValueError, match="under way"):
            call()
    control.update_weights(tensors(a=(2, 3)))
    for wrong in (tensors(b=(5,)), tensors(c=(1,)), b"", b"12345678", tensors(b=(4,))[:-1]):
        with pytest.raises(ValueError, match=r"other tensors|no safetensors"):
            control.update_weights(wrong)
    control.update_weights(tensors(b=(4,)))
    control.finish_weight_update("7", 3)
    assert control.loaded == Weights(3, "7", None)
    updates = ["start_weight_update", "update_weights", "update_weights", "finish_weight_update"]
    assert core.log == ["begin", *updates, "reset", "renewed", "resume", "on"]


def test_a_tensor_that_is_sent_again_is_loaded_once(
    core: Core, control: WeightControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    transfer = object.__new__(WireTransfer)
    transfer.device = torch.device("cpu")
    transfer.model = SimpleNamespace(load_weights=lambda found: loaded.extend(name for name, _ in found))
    control.start_weight_update()
    monkeypatch.setattr(core, "collective_rpc", lambda method, kwargs: transfer.update_weights(**kwargs))
    for part in (tensors(a=(2, 3)), tensors(a=(2, 3)), tensors(a=(2, 3), b=(4,))):
        control.update_weights(part)
    assert loaded == ["a", "b"]


def test_an_update_that_stays_incomplete_or_fails_leaves_the_weights_of_a_directory(core: Core, control: WeightControl) -> None:
    core.batch_queue.clear()
    control.start_weight_update()
    control.update_weights(tensors(a=(2, 3)))
    with pytest.raises(ValueError, match="1 tensors did not come, b"):
        control.finish_weight_update()
    assert core.log[-5:] == ["load old", "reset", "renewed", "resume", "on"]
    control.start_weight_update()
    core.broken = {"update_weights"}
    with pytest.raises(ValueError, match="torn"):
        control.update_weights(tensors(a=(2, 3)))
    assert core.log[-5:] == ["load old", "reset", "renewed", "resume", "on"]
    assert control.loaded == Weights()


def test_an_update_of_which_nothing_came_is_refused_and_keeps_the_weights(core: Core, control: WeightControl) -> None:
    core.batch_queue.clear()
    control.start_weight_update()
    control.update_weights(tensors(a=(2, 3), b=(4,)))
    control.finish_weight_update("7", 3)
    core.log.clear()
    control.start_weight_update()
    with pytest.raises(ValueError, match="2 tensors did not come, a for one; nothing has changed"):
        control.finish_weight_update()
    core.broken = {"start_weight_update"}
    with pytest.raises(ValueError, match="torn"):
        control.start_weight_update()
    assert core.log == 2 * ["begin", "start_weight_update", "abandon_weight_update", "resume", "on"]
    assert control.loaded == Weights(3, "7", None)
    # An engine of vLLM's says nothing of names.
    core.vllm_config.weight_transfer_config.backend = "nccl"
    core.broken.clear()
    control.start_weight_update()
    control.update_weights({"names": ["a"]})
    control.finish_weight_update("8", 4)
    assert control.loaded == Weights(4, "8", None)


@pytest.mark.parametrize(
    ("backend", "sent", "said"), [(NAME, {"names": []}, "bytes"), ("nccl", tensors(a=(2, 3)), "update_info")]
)
def test_tensors_that_come_another_way_are_refused_and_the_update_goes_on(
    core: Core, control: WeightControl, backend: str, sent: Any, said: str
) -> None:
    core.vllm_config.weight_transfer_config.backend = backend
    core.batch_queue.clear()
    control.start_weight_update()
    with pytest.raises(ValueError, match=said):
        control.update_weights(sent)
    assert core.log == ["begin", "start_weight_update"]


def test_an_update_whose_trainer_has_died_is_given_up(
    core: Core, control: WeightControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("backend.engine.weights.time.monotonic", lambda: now)
    core.batch_queue.clear()
    control.start_weight_update()
    now += weights.UPDATE_PATIENCE_S
    control.update_weights(tensors(a=(2, 3)))
    now += weights.UPDATE_PATIENCE_S
    control.look()
    assert control.is_paused
    now += 1
    control.look()
    assert core.log[-6:] == ["abandon_weight_update", "load old", "reset", "renewed", "resume", "on"]
    assert not control.is_paused
    with pytest.raises(ValueError, match="comes first"):
        control.update_weights(tensors(b=(4,)))
    control.start_weight_update()


def test_acceptance_is_counted_by_the_newest_versions() -> None:
    counters = Counters(VerifierStats("v", 0.0, "sync", 4))
    for update in range(VERSIONS + 2):
        counters.stats.weights = Weights(update, f"step-{update}")
        for _ in range(2):
            counters.verification("d", 8, update)
    found = counters.drafter("d").by_version
    assert found == {f"step-{update}": Verified(2, 16, 2 * update) for update in range(2, VERSIONS + 2)}


def test_requests_whose_adapter_is_gone_end_before_the_others_go_on(core: Core, control: WeightControl, tmp_path: Path) -> None:
    """New weights make vLLM forget adapters; it would read them again within a step, and a failure there ends the engine."""
    outputs: list[Any] = []
    control.on_outputs = outputs.append
    core.requests = {"a": asked("a", 1), "b": asked("b", 2), "c": asked("c"), "d": asked("d", 2)}
    core.unreadable, core.batch_queue = {2}, []
    control.reload_weights(checkpoint(tmp_path / "new", a=(2, 3), b=(4,)))
    assert core.log[-4:-1] == ["adapter 1", "adapter 2", "resume"]
    assert sorted(core.requests) == ["a", "c"]
    (ended,) = outputs
    assert [(each.request_id, each.finish_reason) for each in ended[3].outputs] == [
        ("b", FinishReason.ERROR),
        ("d", FinishReason.ERROR),
    ]


def test_an_adapter_in_use_is_not_removed(core: Core, control: WeightControl) -> None:
    core.requests = {"a": asked("a", 1)}
    assert control.remove_lora(1)
    assert control.remove_lora(2)
    assert core.log == ["remove 2"]


def test_a_new_requests_adapter_is_read_when_that_is_possible(core: Core, control: WeightControl) -> None:
    core.unreadable = {2}
    with pytest.raises(OSError, match="gone"):
        control.read_adapter(asked("x", 2).lora_request)
    core.sleeping_tags = {"weights"}
    control.read_adapter(asked("x", 2).lora_request)
    core.sleeping_tags, core.loras = set(), {2}
    control.read_adapter(asked("x", 2).lora_request)
    assert core.log == ["adapter 2"]


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_output_matrix_may_come_or_not(core: Core, tmp_path: Path, stored: bool) -> None:
    """Qwen3-0.6B's checkpoint has it, what transformers writes of that model does not; vLLM skips it."""
    output: dict[str, tuple[int, ...]] = {"lm_head.weight": (2, 3)}
    old = checkpoint(tmp_path / "old", a=(2, 3), **(output if stored else {}))
    (tmp_path / "old" / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    control = WeightControl(core, old, can_sleep=False)
    for name, more in (("with", output), ("without", {})):
        control.reload_weights(checkpoint(tmp_path / name, a=(2, 3), **more))
        control.start_weight_update()
        control.update_weights(save({key: torch.zeros(shape) for key, shape in {**more, "a": (2, 3)}.items()}))
        assert core.skipped == sorted(more)
        control.finish_weight_update()
    with pytest.raises(ValueError, match="a: none instead of"):
        control.reload_weights(checkpoint(tmp_path / "other", **output))


def test_an_adapter_in_place_of_one_that_was_used_makes_its_caches_void(core: Core, control: WeightControl) -> None:
    new = SimpleNamespace(lora_int_id=1, load_inplace=True)
    control.add_lora(new)
    assert core.log == ["adapter 1"]
    control.read_adapter(SimpleNamespace(lora_int_id=1, load_inplace=False))
    control.add_lora(new)
    assert core.log == ["adapter 1", "adapter 1", "adapter 1", "discard"]
