"""Model names become directories, or one line that says why not."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors import SafetensorError

from backend.config import Settings
from backend.models.demo import DRAFT_MODEL_DIR, DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import ModelError, resolve
from tests.support.other_vocabulary import write_tokenizer


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(changes)


def quiet(line: str) -> None:
    raise AssertionError(f"nothing should be said, but: {line}")


def refusal(**changes: Any) -> str:
    """The line that says why not."""
    with pytest.raises(ModelError) as error:
        resolve(settings(**changes), lambda line: None)
    assert "\n" not in str(error.value)
    return str(error.value)


def target(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("mode", "drafter", "kind"),
    [("off", "demo", "none"), ("native", "ngram", "ngram"), ("sync", "ngram", "ngram"), ("native", "demo", "eagle")],
)
def test_the_mode_says_what_drafts(mode: str, drafter: str, kind: str) -> None:
    models = resolve(settings(mode=mode, drafter=drafter), quiet)
    assert (models.target_dir, models.name, models.drafter_kind) == (str(TARGET_DIR), "demo", kind)
    assert models.drafter_dir == (str(DRAFTER_DIR) if kind == "eagle" else None)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json: not a model's directory"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
        (lambda d: (d / "config.json").write_text("{}"), "names no architectures"),
        (lambda d: (d / "model.safetensors").unlink(), "no weights"),
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x-1", "b": "x-2"}}'),
            "2 of 2 weight files are missing (x-1)",
        ),
    ],
)
def test_an_incomplete_directory_is_refused(tmp_path: Path, spoil: Any, line: str) -> None:
    directory = target(tmp_path / "m")
    spoil(directory)
    error = refusal(model=str(directory), mode="off")
    assert line in error
    assert str(directory) in error


def test_pickles_may_be_missing_where_there_are_safetensors(tmp_path: Path) -> None:
    directory = target(tmp_path / "m")
    (directory / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    assert resolve(settings(model=str(directory), mode="off"), quiet).target_dir == str(directory)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mode": "sync", "drafters": 0}, "--mode sync needs a drafter"),
        ({"model": "some/model"}, "--drafter demo fits only the demo model"),
        ({"model": "/nowhere", "drafter": "ngram"}, "--model /nowhere: no such directory"),
        ({"model": "a b", "mode": "off"}, "neither a directory nor a Hugging Face id"),
        ({"mode": "native", "drafter": "grow"}, ""),
        ({"drafter": str(DRAFT_MODEL_DIR), "drafting": {"learning": "on"}}, "EAGLE"),
    ],
)
def test_what_cannot_work_is_one_line(changes: dict[str, Any], line: str) -> None:
    assert line in refusal(**changes)


def test_a_first_head_that_has_no_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=SafetensorError("No space left on device")))
    error = refusal(drafter="grow", drafting={"learning_dir": str(tmp_path)})
    assert error == f"--drafter grow: {tmp_path}/start cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())


def test_where_a_model_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = target(tmp_path / "m", hidden_size=999, vocab_size=2048, num_hidden_layers=5)
    assert resolve(settings(model="~/m", mode="off"), quiet).target_dir == str(directory)
    assert "does not fit" in refusal(model="~/m", drafter=str(DRAFTER_DIR)), "the head is another target's"
    for model, line in (
        ("~/n", f"--model ~/n (that is {tmp_path}/n): no such directory"),
        ("~/m/model.safetensors", "is a file"),
        ("outrider-tests/not-there", "not in the local cache, and HF_HUB_OFFLINE is set"),
    ):
        assert line in refusal(model=model, mode="off")


@pytest.mark.parametrize("code", [False, True])
def test_a_download_brings_weights_once_and_code_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: bool
) -> None:
    listed = ["config.json", "model-1.safetensors", "original/model.safetensors", "metal/model.safetensors", "m.py"]
    fetched: list[str] = []

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool) -> str:
        fetched.extend(filter_repo_objects(listed, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(target(tmp_path / "snapshot"))

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    trust = {"verifier": {"engine_args": {"trust_remote_code": True}}} if code else {}
    resolve(settings(model="some/model", mode="off", **trust), lambda line: None)
    assert fetched == ["config.json", "model-1.safetensors", *(["m.py"] if code else [])]


def test_a_model_that_vllm_reads_by_the_checkpoints_code_names_the_setting(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    directory = target(tmp_path / "m", architectures=["MiMoForCausalLM"], model_type="mimo", auto_map=auto_map)
    changes = {"model": str(directory), "drafter": "ngram"}
    assert "if you trust that: --verifier-engine-args" in refusal(**changes)
    assert resolve(settings(**changes, verifier={"engine_args": {"trust_remote_code": True}}), quiet).name == "m"


def test_ranks_must_divide_the_attention_heads(tmp_path: Path) -> None:
    assert "4 attention heads cannot be dealt out to 3 ranks" in refusal(verifier={"tensor_parallel": 3})
    nested = target(tmp_path / "m", text_config={"num_attention_heads": 6})
    assert "6 attention heads" in refusal(model=str(nested), mode="off", verifier={"tensor_parallel": 4})
    assert resolve(settings(model=str(nested), mode="off", verifier={"tensor_parallel": 3}), quiet).name == "m"


def draft_model(directory: Path, rows: int = 2100, **tokenizer: int) -> Path:
    """A tiny draft model for the demo target; `tokenizer`: tokens with other ids than the target's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": rows, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(directory)
    content = json.loads((TARGET_DIR / "tokenizer.json").read_text())
    content["model"]["vocab"] |= tokenizer
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


def test_a_model_with_the_same_tokenizer_drafts_and_with_another_vocabulary_the_shared_tokens_are_counted(
    tmp_path: Path,
) -> None:
    directory = draft_model(tmp_path / "same", unheard=2060)
    models = resolve(settings(drafter=str(directory)), quiet)
    assert (models.drafter_kind, models.drafter_dir, models.in_turn) == ("draft_model", str(directory), ())
    lines: list[str] = []
    resolve(settings(drafter=str(draft_model(tmp_path / "d", **{"import": 2060}))), lines.append)
    told = "knows 2048 of the target's 2048 tokens, under other ids, which are mapped"
    assert [line.partition(" it ")[2] for line in lines if "tokens" in line] == [told]
    write_tokenizer(tmp_path / "d", {"import": 0, "def": 1, "class": 2, **{f"t{i}": 3 + i for i in range(4)}})
    few = r"does not fit .* shares 3 tokens .* less than 50% of the smaller one's 7"
    assert re.search(few, refusal(drafter=str(tmp_path / "d")))


def test_tokenizers_nobody_can_compare_are_a_warning_unless_sizes_differ(tmp_path: Path) -> None:
    lines: list[str] = []
    (draft_model(tmp_path / "d", 2048) / "tokenizer.json").unlink()
    resolve(settings(drafter=str(tmp_path / "d")), lines.append)
    assert ["nobody knows whether their tokens are the same" in line for line in lines] == [True]
    (draft_model(tmp_path / "e") / "tokenizer.json").unlink()
    refused = refusal(drafter=str(tmp_path / "e"))
    assert "it has 2100 tokens, the target 2048; to map them, both directories must have" in refused


def test_several_drafters_take_their_models_in_turn(tmp_path: Path) -> None:
    directory = draft_model(tmp_path / "d")
    models = resolve(settings(drafter=f"{directory}, demo,ngram", drafters=4), quiet)
    kinds = [models.drafter(f"drafter-{i}").kind for i in range(4)]
    assert kinds == ["draft_model", "eagle", "ngram", "draft_model"]
    assert models.drafter_kind == "eagle", "verifiers send the features that the head needs"
    for changes, line in (({"mode": "native"}, "drafts with one model"), ({"drafters": 2}, "names 3 models")):
        assert line in refusal(**({"drafter": f"{directory},demo,ngram", "drafters": 3} | changes))
