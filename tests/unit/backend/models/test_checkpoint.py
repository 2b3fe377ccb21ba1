"""EAGLE heads on disk: both layouts and file formats are the same head, and what does not fit is said in one line."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.drafter.proposer import DraftRequest, Until
from backend.models.check import find_misfits, why_not_learning
from backend.models.checkpoint import load_drafter, load_fc
from backend.models.head_config import CheckpointError, load_config
from backend.models.tensor_files import TensorFiles
from tests.support.drafter_heads import TinyHead, check, make_proposer, write_head, write_target


def edit(directory: str, **changes: Any) -> None:
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pair(directory: Path, head: TinyHead, target: TinyHead | None = None, layout: str = "eagle") -> tuple[str, str]:
    return write_head(directory / "head", head, layout), write_target(directory / "target", target or head)


@pytest.mark.parametrize("draft_vocab", [61, 23])
def test_layouts_and_formats_are_the_same_head(tmp_path: Path, draft_vocab: int) -> None:
    head = TinyHead(draft_vocab=draft_vocab)
    answers = []
    for layout in ("eagle", "speculators"):
        for suffix in ("safetensors", "bin"):
            proposer = make_proposer(tmp_path / layout / suffix, head, layout=layout, suffix=suffix)
            features = torch.randn(19, head.hidden, generator=torch.Generator().manual_seed(1))
            proposer.open(0, list(range(20)), 19)
            answers.append(proposer.draft([DraftRequest(0, 20, 19, features, Until(6))])[0].tokens)
    assert len(answers[0]) == 6
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("slope", "shift"), [(1, 60), (0, 0)], ids=["outside the vocabulary", "twice the same token"])
def test_offsets_that_are_no_tokens_of_their_own_are_refused(tmp_path: Path, slope: int, shift: int) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead(draft_vocab=23))
    path = Path(head_dir) / "model.safetensors"
    tensors = load_file(path)
    own = torch.arange(23)
    save_file(tensors | {"d2t": slope * (tensors["d2t"] + own) + shift - own}, path)
    with pytest.raises(CheckpointError, match="d2t"):
        load_drafter(head_dir, target_dir)


def test_what_the_head_lacks_comes_from_the_target(tmp_path: Path) -> None:
    head = TinyHead(kind="eagle")
    weights = load_drafter(*pair(tmp_path, head))
    assert torch.equal(weights.embedding, head.weights()["target.embed"])
    assert torch.equal(weights.lm_head, head.weights()["target.lm_head"])
    tied = load_drafter(write_head(tmp_path / "h", head), write_target(tmp_path / "t", head, tied=True))
    assert torch.equal(tied.lm_head, head.weights()["target.embed"])


@pytest.mark.parametrize("stored", [("weight", "weight_scale"), ("qweight", "scales"), ("weight_packed", "weight_scale")])
def test_a_quantised_output_matrix_of_the_target_is_not_taken_for_another(tmp_path: Path, stored: tuple[str, str]) -> None:
    """Not for one without scales, and not for the embedding, where it has another name."""
    head_dir, target_dir = pair(tmp_path, TinyHead(kind="eagle"))
    path = Path(target_dir) / "model.safetensors"
    tensors = load_file(path)
    matrix = tensors.pop("lm_head.weight").to(torch.float8_e4m3fn)
    save_file(tensors | {f"lm_head.{stored[0]}": matrix, f"lm_head.{stored[1]}": torch.ones(1)}, path)
    line = "tensor lm_head.weight: quantised in the target, and the head has none of its own"
    assert check(head_dir, target_dir) == [line]
    with pytest.raises(CheckpointError, match=line):
        load_drafter(head_dir, target_dir)
    assert check(write_head(tmp_path / "own", TinyHead()), target_dir) == []
    assert "output matrix is quantised" in (why_not_learning(str(tmp_path / "own"), target_dir) or "")


def test_feature_layers(tmp_path: Path) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead())
    assert load_config(head_dir, target_dir).aux_layers == (2, 4, 5)
    assert load_config(head_dir).aux_layers == ()
    edit(head_dir, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})
    assert load_config(head_dir).aux_layers == (1, 3, 6)
    edit(head_dir, eagle_config={"use_aux_hidden_state": False})
    assert not load_config(head_dir, target_dir).uses_aux
    # A midlayer is one layer, although the configuration repeats the target's number.
    edit(head_dir, eagle_config=None, num_hidden_layers=40)
    assert check(head_dir, target_dir) == []
    assert load_drafter(head_dir, target_dir).config.num_layers == 1
    with pytest.raises(CheckpointError, match="no projection"):
        load_fc(write_head(tmp_path / "plain", TinyHead(kind="eagle")))


def test_what_layouts_disagree_about(tmp_path: Path) -> None:
    for layout, is_before in (("eagle", False), ("speculators", True)):
        path = Path(write_head(tmp_path / layout, TinyHead(), layout)) / "config.json"
        config = json.loads(path.read_text())
        del config["norm_before_residual"]
        path.write_text(json.dumps(config))
        assert load_config(str(path.parent)).norm_before_residual is is_before
    head_dir, target_dir = pair(tmp_path, TinyHead(), layout="speculators")
    for key in ("torch_dtype", "dtype"):
        edit(write_head(tmp_path / key, TinyHead(), "speculators"), **{key: "bfloat16"})
        assert load_config(str(tmp_path / key)).dtype == "bfloat16", "it is outside the layer's part"
    edit(head_dir, speculators_model_type="medusa")
    assert "medusa" in check(head_dir, target_dir)[0]


@pytest.mark.parametrize(("before_fc", "per_feature"), [(False, False), (True, False), (False, True)])
def test_the_projection_is_the_heads(tmp_path: Path, before_fc: bool, per_feature: bool) -> None:
    head = TinyHead(norm_before_fc=before_fc, fc_norm=per_feature)
    project = load_fc(write_head(tmp_path, head, "speculators")).to("cpu", torch.float64)
    weights = {name: tensor.double() for name, tensor in head.weights().items()}
    hidden = torch.randn(5, 3 * head.hidden, dtype=torch.float64)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    expected = norm(hidden, weights["input_norm.weight"]) if before_fc else hidden
    if per_feature:
        parts = expected.chunk(3, dim=1)
        expected = torch.cat([norm(p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=1)
    assert torch.allclose(project(hidden), expected @ weights["fc.weight"].T)
    assert project.aux_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("head", "target", "line"),
    [
        (TinyHead(hidden=32), TinyHead(hidden=16), "hidden size: the head was made for a target of 32, this one has 16"),
        (TinyHead(vocab=61), TinyHead(vocab=64), "vocabulary: the head was made for 61 tokens, this target has 64"),
        (TinyHead(), TinyHead(target_layers=4), "feature layers: a target of 4 layers is too shallow for the default three"),
        (TinyHead(max_position=128), TinyHead(), "warning: max_position_embeddings: the head says 128, the target 512"),
    ],
)
def test_misfits_have_a_line_each(tmp_path: Path, head: TinyHead, target: TinyHead, line: str) -> None:
    lines = check(*pair(tmp_path, head, target))
    assert any(found.startswith(line) for found in lines), lines


def test_a_head_that_was_trained_for_another_way_of_drafting_warns(tmp_path: Path) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead())
    path = Path(head_dir) / "model.safetensors"
    save_file(load_file(path) | {"mask_hidden": torch.zeros(1, 3 * 32)}, path)
    (line,) = check(head_dir, target_dir)
    assert line.startswith("warning: it was trained to draft all tokens in one pass (P-EAGLE)")


def test_a_stretched_rotation_begins_at_the_longest_position_unless_another_is_named(tmp_path: Path) -> None:
    head = TinyHead(rope={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0})
    assert make_proposer(tmp_path, head).max_position == 512
    assert load_config(str(tmp_path / "head")).rope.scaling["original_max_position_embeddings"] == 512


def test_numbers_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    head_dir, _ = pair(tmp_path, TinyHead())
    infinite = {"num_attention_heads": 4, "max_position_embeddings": float("inf")}
    for wrong in ({"num_attention_heads": 0, "head_dim": None}, infinite):
        edit(head_dir, **wrong)
        with pytest.raises(CheckpointError, match="Error: "):
            load_config(head_dir)


def test_misfits_of_the_configuration(tmp_path: Path) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead())
    edit(head_dir, rope_theta=5e5, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 40]})
    found = find_misfits(head_dir, target_dir)
    assert found.errors == ["feature layers: 40 is outside this target's 0..8"]
    assert found.warnings == ["rope_theta: the head says 500000, the target 10000"]
    edit(head_dir, rope_theta=1e4, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    (line,) = find_misfits(head_dir, target_dir).warnings
    assert line.startswith("feature layers: 1, 3, 4 are read as the inputs of these layers, as in vLLM; if ")
    lengths = {"original_max_position_embeddings": 64}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, **lengths}
    edit(head_dir, rope_theta=1e4, rope_scaling=scaling, eagle_config=None)
    assert find_misfits(head_dir, target_dir).warnings == [
        "rope scaling: the head says llama3 factor=8 low_freq_factor=1 original_max_position_embeddings=64, "
        "the target default; acceptance may drop"
    ]
    edit(target_dir, rope_parameters={"rope_theta": 1e4, **scaling, "attention_bias": None})
    assert find_misfits(head_dir, target_dir).warnings == []
    edit(head_dir, rope_scaling={"type": "linear", "factor": 4})
    assert find_misfits(head_dir, target_dir).warnings == [
        "rope scaling: the head says linear factor=4, the target llama3 factor=8 low_freq_factor=1 "
        "original_max_position_embeddings=64; acceptance may drop"
    ]
    edit(target_dir, rope_parameters=None)
    edit(head_dir, draft_vocab_size=99)
    assert "draft vocabulary: 99 tokens are more than the target's 61" in check(head_dir, target_dir)
    edit(head_dir, draft_vocab_size=61, hidden_act="gelu", rope_scaling={"rope_type": "yarn"}, eagle_config={})
    assert len(find_misfits(head_dir, target_dir).errors) == 2
    with pytest.raises(CheckpointError, match="yarn"):
        load_drafter(head_dir, target_dir)


def test_missing_and_misshapen_tensors(tmp_path: Path) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead(draft_vocab=23), layout="speculators")
    layer = json.loads((Path(head_dir) / "config.json").read_text())["transformer_layer_config"]
    edit(head_dir, draft_vocab_size=22, transformer_layer_config=layer | {"num_hidden_layers": 2})
    lines = check(head_dir, target_dir)
    assert "tensor lm_head.weight: shape [23, 32], expected [22, 32]" in lines
    assert "missing tensor: layers.1.mlp.down_proj.weight" in lines
    with pytest.raises(CheckpointError):
        load_drafter(head_dir, target_dir)


def test_broken_files_are_reported_and_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    head_dir, target_dir = pair(tmp_path, TinyHead())
    file, files = Path(head_dir) / "model.safetensors", TensorFiles(head_dir)
    for content in (b"", b"\xff" * 40, (2**62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"):
        file.write_bytes(content)
        assert len(check(head_dir, target_dir)) == 1
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read_many(list(files.tensors))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    file.unlink()
    (Path(head_dir) / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    assert len(check(head_dir, target_dir)) == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("module", "absent"), [("backend.models.check", "torch"), ("backend.drafter.process", "vllm")])
def test_imports_stay_light(module: str, absent: str) -> None:
    code = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_head_written_anew_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from backend.engine.worker import gpu_worker as worker

    load_fc = Mock(return_value=torch.nn.Identity())
    own, other = (str(tmp_path / name) for name in ("own", "other"))

    def write(at: int) -> None:
        for path in (Path(own, "model.safetensors"), Path(other, "model.safetensors")):
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.utime(path, ns=(at, at))

    runner = SimpleNamespace(device="cpu", dtype=torch.float32)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr("backend.models.checkpoint.load_fc", load_fc)
    options = {"raw_features": False, "head_dir": own, "aux_layers": (1,), "ring_bytes": 0}
    mixed: Any = SimpleNamespace(model_runner=runner)
    write(0)
    shipper: Any = worker.Mixed._make_shipper(mixed, options)
    for at in (0, 1):
        write(at)
        for head in ("", "", other, other):
            shipper._projection(head)
    assert load_fc.call_args_list == 2 * [call(own), call(other)]
