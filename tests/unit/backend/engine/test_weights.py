"""Exchanging a target's weights: what is refused, in which order things happen, and what is left after a failure."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save

from backend.engine import weights
from backend.engine.counting import Counters
from backend.engine.weights import WeightControl
from backend.engine.worker.tensor_transfer import WireTransfer
from backend.fleet import VERSIONS, Verified, VerifierStats
from backend.fleet.stats import Weights
from tests.unit.backend.engine.noted_core import Core, checkpoint, tensors


def test_weights_are_loaded_between_steps_and_requests_go_on(core: Core, control: WeightControl, tmp_path: Path) -> None:
    core.batch_queue = ["a", "b"]  # steps that are under way
    control.reload_weights(checkpoint(tmp_path / "new", a=(2, 3), b=(4,)))
    assert core.log == ["step b", "step a", "begin", "load new", "reset", "renewed", "resume", "on"]
    assert not control.is_paused
    core.log.clear()
    # The next time "the same again" means these.
    control.reload_weights()
    assert core.log == ["begin", "load new", "reset", "renewed", "resume", "on"]


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
    core.broken = {"new"}
    with pytest.raises(ValueError, match="could not be loaded: torn"):
        control.reload_weights(new)
    assert core.log == ["begin", "load new", "abandon_weight_update", "load old", "reset", "renewed", "resume", "on"]
    core.log.clear()
    core.broken = {"new", "old"}
    # The process ends: Ray starts another.
    with pytest.raises(SystemExit):
        control.reload_weights(new)


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


def test_tensors_come_in_parts(core: Core, control: WeightControl) -> None:
    with pytest.raises(ValueError, match="start_weight_update"):
        control.update_weights(tensors(a=(2, 3)))
    with pytest.raises(ValueError, match="start_weight_update"):
        control.finish_weight_update()
    control.start_weight_update()
    for call in (control.resume, control.reload_weights, control.start_weight_update, partial(control.sleep, 0)):
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


def test_tensors_wait_in_host_memory_for_their_layer_and_one_that_is_sent_again_is_loaded_once(
    core: Core, control: WeightControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    loaded: list[tuple[str, torch.Tensor]] = []
    transfer = WireTransfer.__new__(WireTransfer)
    transfer.device, transfer.model = torch.device("cuda"), SimpleNamespace(load_weights=loaded.extend)
    control.start_weight_update()
    monkeypatch.setattr(core, "collective_rpc", lambda method, kwargs: transfer.update_weights(**kwargs))
    for part in (tensors(a=(2, 3)), tensors(a=(2, 3)), tensors(a=(2, 3), b=(4,))):
        control.update_weights(part)
    assert [(name, tensor.device.type) for name, tensor in loaded] == [("a", "cpu"), ("b", "cpu")]


def test_an_update_that_fails_leaves_the_weights_of_a_directory(core: Core, control: WeightControl) -> None:
    control.start_weight_update()
    core.broken = {"update_weights"}
    with pytest.raises(ValueError, match="torn"):
        control.update_weights(tensors(a=(2, 3)))
    assert core.log[-5:] == ["load old", "reset", "renewed", "resume", "on"]
    assert control.loaded == Weights()


def test_an_update_of_which_nothing_came_is_refused_and_keeps_the_weights(core: Core, control: WeightControl) -> None:
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
    # An engine of vLLM's says nothing of names, and takes no bytes, which ends no update.
    core.vllm_config.weight_transfer_config.backend = "nccl"
    core.broken.clear()
    core.log.clear()
    control.start_weight_update()
    with pytest.raises(ValueError, match="update_info"):
        control.update_weights(tensors(a=(2, 3)))
    assert core.log == ["begin", "start_weight_update"]
    control.update_weights({"names": ["a"]})
    control.finish_weight_update("8", 4)
    assert control.loaded == Weights(4, "8", None)


def test_an_update_whose_trainer_has_died_is_given_up(
    core: Core, control: WeightControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("backend.engine.weights.time.monotonic", lambda: now)
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


@pytest.mark.parametrize(("stored", "said"), [(True, True), (False, True), (False, False)])
def test_a_tied_output_matrix_may_come_or_not(core: Core, tmp_path: Path, stored: bool, said: bool) -> None:
    """Qwen3-0.6B's checkpoint has it, what transformers writes of that model does not; vLLM skips it.

    Gemma's configuration does not say that it is tied.
    """
    output: dict[str, tuple[int, ...]] = {"lm_head.weight": (2, 3)}
    old = checkpoint(tmp_path / "old", a=(2, 3), **(output if stored else {}))
    (tmp_path / "old" / "config.json").write_text(json.dumps({"tie_word_embeddings": True} if said else {}))
    control = WeightControl(core, old, can_sleep=False)
    for name, more in (("with", output), ("without", {})):
        control.reload_weights(checkpoint(tmp_path / name, a=(2, 3), **more))
        control.start_weight_update()
        control.update_weights(save({key: torch.zeros(shape) for key, shape in {**more, "a": (2, 3)}.items()}))
        assert core.skipped == sorted(more)
        control.finish_weight_update()
    with pytest.raises(ValueError, match="a: none instead of"):
        control.reload_weights(checkpoint(tmp_path / "other", **output))
