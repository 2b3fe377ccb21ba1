"""Pauses and sleep of a verifier, and its adapters, beside the exchange of its target's weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from backend.engine.weights import WeightControl
from backend.wire.engine import PAUSED
from tests.unit.backend.engine.noted_core import Core, asked, checkpoint, tensors


def test_a_paused_verifier_stays_paused(core: Core, control: WeightControl) -> None:
    control.sleep(0)
    control.reload_weights()
    assert control.is_paused
    assert control.wake_up()
    assert core.log[-2:] == [("wake", ["scheduling"]), "on"]
    assert not control.is_paused


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
    core.model_executor.sleeping_tags = frozenset({"weights", "kv_cache"})
    able.wake_up(["weights"])
    assert core.log[-1] == ("wake", ["weights"])


def test_a_verifier_that_did_not_sleep_goes_on_with_those_that_did(core: Core) -> None:
    """It was started while others slept, and is only paused: they wake their KV cache last, behind new weights."""
    control = WeightControl(core, "", can_sleep=True)
    assert control.wake_up(["weights"]), "nothing is to be undone"
    control.pause("keep")
    assert not control.wake_up(["weights"])
    assert control.is_paused
    assert control.wake_up(["kv_cache"])
    assert not control.is_paused


def test_weights_that_are_awake_are_updated_while_the_kv_cache_sleeps(core: Core, control: WeightControl) -> None:
    """A trainer on the same GPU has room for both only afterwards."""
    core.pause_state = PauseState.PAUSED_ALL
    core.model_executor.sleeping_tags = frozenset({"weights", "kv_cache"})
    for call in (control.reload_weights, control.start_weight_update):
        with pytest.raises(ValueError, match="wake the weights up"):
            call()
    core.model_executor.sleeping_tags = frozenset({"kv_cache"})
    control.reload_weights()
    control.start_weight_update()
    control.update_weights(tensors(a=(2, 3), b=(4,)))
    with pytest.raises(ValueError, match="under way"):
        control.wake_up()
    control.finish_weight_update()
    assert "resume" not in core.log
    with pytest.raises(ValueError, match="wake it up"):
        control.resume()


def test_a_pause_keeps_aborts_or_waits(core: Core, control: WeightControl) -> None:
    sent: list[Any] = []
    control.on_outputs = sent.append
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


@pytest.mark.parametrize("tags", [{"weights", "kv_cache"}, {"kv_cache"}])
def test_a_pause_that_waits_runs_nothing_while_memory_sleeps(core: Core, control: WeightControl, tags: set[str]) -> None:
    """A step would read weights, or a KV cache, that are not there, and end the engine."""
    core.requests = {"one": asked("one")}
    control.sleep(0)
    core.model_executor.sleeping_tags = frozenset(tags)
    control.pause("wait")
    control.look()
    assert control.is_paused
    assert "one" in core.requests


@pytest.mark.parametrize("end", ["resume", "wake_up"])
def test_a_pause_that_is_over_before_its_requests_have_ended_does_not_come_back(
    core: Core, control: WeightControl, end: str
) -> None:
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


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_update_leaves_a_pause_alone(core: Core, control: WeightControl, mode: str) -> None:
    def pause() -> None:
        core.requests = {"one": asked("one")}
        control.pause(mode)

    def by_tensors() -> None:
        update_by_tensors(control, control.look)

    for update in (control.reload_weights, by_tensors):
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


def test_requests_whose_adapter_is_gone_end_before_the_others_go_on(core: Core, control: WeightControl, tmp_path: Path) -> None:
    """New weights make vLLM forget adapters; it would read them again within a step, and a failure there ends the engine."""
    outputs: list[Any] = []
    control.on_outputs = outputs.append
    core.requests = {"a": asked("a", 1), "b": asked("b", 2), "c": asked("c"), "d": asked("d", 2)}
    core.unreadable = {2}
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
    control.on_reading = lambda: core.log.append("reading")
    with pytest.raises(OSError, match="gone"):
        control.read_adapter(asked("x", 2).lora_request)
    core.model_executor.sleeping_tags = frozenset({"weights"})
    control.read_adapter(asked("x", 2).lora_request)
    core.model_executor.sleeping_tags, core.loras = frozenset(), {2}
    control.read_adapter(asked("x", 2).lora_request)
    assert core.log == ["reading", "adapter 2"]
