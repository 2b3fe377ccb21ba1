"""What people may say of vLLM's own arguments, and what stays ours."""

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import vllm.platforms
from vllm.config import ModelConfig, MultiModalConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import UnspecifiedPlatform

from backend.config import Settings
from backend.engine.arguments import EngineSetupError, common_arguments
from backend.engine.build import AHEAD_OUTCOMES, build_config, engine_arguments
from backend.engine.front.config import build_vllm_config
from backend.engine.worker.fixed import takes_fixed
from backend.models.check import find_misfits
from backend.models.demo import DRAFT_MODEL_DIR, DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels
from tests.support.drafter_heads import TinyHead, write_head
from tests.support.other_vocabulary import write_permuted
from tests.support.processes import ROOT, demo_models


def arguments(**engine_args: object) -> dict[str, Any]:
    settings = Settings.model_validate(
        {"mode": "native", "num_speculative_tokens": 3, "verifier": {"engine_args": engine_args}}
    )
    return engine_arguments(settings, demo_models())


def test_vllm_is_told_of_a_draft_model_with_other_ids_or_other_padding(tmp_path: Path) -> None:
    """Qwen2.5's models have one tokenizer, and 151,936 or 152,064 rows."""
    permuted, fewer = write_permuted(DRAFT_MODEL_DIR, tmp_path / "permuted"), tmp_path / "fewer"
    shutil.copytree(DRAFT_MODEL_DIR, fewer)
    config = json.loads((fewer / "config.json").read_text())
    (fewer / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 128}))
    for directory, differs in ((DRAFT_MODEL_DIR, False), (permuted, True), (fewer, True)):
        paths = ResolvedModels(str(TARGET_DIR), str(directory), "draft_model")
        given = engine_arguments(Settings(mode="native"), paths)["speculative_config"]
        assert (given["method"], given["use_heterogeneous_vocab"]) == ("draft_model", differs)


def test_a_head_is_refused_where_vllms_class_gives_no_hidden_states(tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(TARGET_DIR / file)
    names = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "float32", "head_dim": 64}
    sizes = {"hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(names | sizes | {"max_position_embeddings": 2048}))
    with pytest.raises(EngineSetupError, match="Gemma3ForCausalLM gives no hidden states: take an EAGLE-1 head") as error:
        build_config(Settings(mode="sync"), ResolvedModels(str(tmp_path), str(DRAFTER_DIR), "eagle"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("engine_args", [{}, {"async_scheduling": False}], ids=["no GPU", "V1 runner"])
def test_native_refuses_a_dspark_head_where_vllms_v2_runner_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_args: dict[str, object]
) -> None:
    monkeypatch.setattr("backend.engine.build.environment.export", {}.update)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: not engine_args)
    head = write_head(tmp_path, TinyHead("dspark", 256, 4, 2, 64, 32, 2048, 2048))
    paths = ResolvedModels(str(TARGET_DIR), head, "dflash")
    settings = Settings.model_validate({"mode": "native", "verifier": {"engine_args": engine_args}})
    with pytest.raises(EngineSetupError, match="DSpark heads only in its V2 runner") as error:
        build_config(settings, paths)
    assert "\n" not in str(error.value)
    method = engine_arguments(settings, paths)["speculative_config"]["method"]
    assert (method, find_misfits(head, str(TARGET_DIR)).kind) == ("dspark", "dflash")


def test_other_arguments_take_the_place_of_ours_of_any_dictionary_only_what_is_said_and_unknown_ones_are_named() -> None:
    ours, theirs = arguments(), {"block_size": 32, "max_num_batched_tokens": 7, "kv_cache_memory_bytes": 1 << 20}
    drafting, own = ours["speculative_config"], ours["additional_config"]["outrider"]
    assert (drafting["method"], drafting["num_speculative_tokens"]) == ("eagle3", 3)
    assert (ours["kv_cache_memory_bytes"], own["ahead_outcomes"]) == (256 << 20, AHEAD_OUTCOMES)
    parts = {"speculative_config": {"draft_sample_method": "probabilistic"}}
    given = arguments(**theirs, **parts, additional_config={"x": 1, "outrider": {"ahead_outcomes": 3}})
    assert {name: given[name] for name in theirs} == theirs
    assert given["speculative_config"] == drafting | {"draft_sample_method": "probabilistic"}
    assert given["additional_config"] == {"x": 1, "outrider": own | {"ahead_outcomes": 3}}
    misspelt = Settings.model_validate({"verifier": {"engine_args": {"block_sise": 32}}})
    for make in (lambda: arguments(block_sise=32), lambda: build_vllm_config(misspelt, demo_models().target_dir)):
        with pytest.raises(EngineSetupError, match="vLLM has no argument block_sise"):
            make()


@pytest.mark.parametrize(
    ("mode", "engine_args", "v1"),
    [
        ("native", {}, False),
        ("native", {"async_scheduling": False}, True),
        ("off", {}, True),
        ("off", {"async_scheduling": True}, True),
        ("auto", {}, True),
    ],
)
def test_fixed_responses_need_the_v1_runner_and_synchronous_scheduling(
    mode: str, engine_args: dict[str, object], v1: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported: dict[str, str] = {}
    monkeypatch.setattr("backend.engine.build.environment.export", exported.update)
    config = build_config(Settings.model_validate({"mode": mode, "verifier": {"engine_args": engine_args}}), demo_models())
    assert exported == ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if v1 else {})
    assert takes_fixed(config), "on a CPU vLLM always schedules so"
    config.scheduler_config.async_scheduling = True
    assert takes_fixed(config) == (mode == "auto"), "no step of its begins early while there is such a request"


@pytest.mark.parametrize(
    ("mode", "verifier", "captured"),
    [
        ("auto", {}, 576),
        ("auto", {"max_num_seqs": 58}, 528),
        ("auto", {"max_num_seqs": 56}, None),
        ("auto", {"max_num_seqs": 256}, 1024),
        ("auto", {"engine_args": {"cudagraph_capture_sizes": [1, 8]}}, None),
        ("auto", {"engine_args": {"compilation_config": {"max_cudagraph_capture_size": 64}}}, None),
        ("native", {}, None),
    ],
)
def test_full_steps_are_captured_unless_vllm_captures_them_or_people_name_sizes(
    mode: str, verifier: dict[str, object], captured: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.model_validate({"mode": mode, "num_speculative_tokens": 8, "verifier": {"max_num_seqs": 64} | verifier})
    for is_cpu, is_blackwell in ((True, False), (False, True), (False, False)):
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self, is_cpu=is_cpu: is_cpu)
        monkeypatch.setattr(type(current_platform), "is_device_capability_family", lambda self, _, is_=is_blackwell: is_)
        found = engine_arguments(settings, demo_models()).get("max_cudagraph_capture_size")
        assert found == (None if is_cpu or is_blackwell else captured)


@pytest.mark.parametrize(
    ("model", "given", "found"),
    [
        ("demo", {}, ("xgrammar", True)),
        ("demo", {"backend": "auto"}, ("xgrammar", True)),
        ("demo", {"backend": "guidance"}, ("guidance", True)),
        ("demo", {"disable_any_whitespace": False}, ("xgrammar", False)),
        (str(TARGET_DIR), {}, ("xgrammar", False)),
        (str(TARGET_DIR), {"backend": "guidance", "disable_any_whitespace": True}, ("guidance", True)),
    ],
)
def test_gateways_and_verifiers_have_one_grammar_backend(model: str, given: dict[str, Any], found: tuple[str, bool]) -> None:
    """With `auto`, vLLM chooses by request, and a verifier keeps the first one's."""
    settings = Settings.model_validate({"model": model, "verifier": {"engine_args": {"structured_outputs_config": given}}})
    for config in (build_config(settings, demo_models()), build_vllm_config(settings, str(TARGET_DIR))):
        structured = config.structured_outputs_config
        assert (structured.backend, structured.disable_any_whitespace) == found


def test_mistrals_own_tokenizers_have_guidance_and_backends_that_ignore_much_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").touch()
    assert common_arguments(Settings(), str(tmp_path))["structured_outputs_config"]["backend"] == "guidance"
    for given in ({"backend": "outlines"}, {"backend": "lm-format-enforcer"}, "xgrammar"):
        settings = Settings.model_validate({"verifier": {"engine_args": {"structured_outputs_config": given}}})
        with pytest.raises(EngineSetupError, match="structured_outputs_config"):
            common_arguments(settings, str(TARGET_DIR))


def test_a_gateway_of_the_cuda_build_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    monkeypatch.setattr(UnspecifiedPlatform, "device_type", "")
    config = build_vllm_config(Settings(), demo_models().target_dir)
    assert config.device_config.device_type == "cpu"


@pytest.mark.parametrize("mode", ["auto", "off", "native"])
def test_a_gateway_beside_a_gpu_checks_requests_for_the_v1_runner(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the verifiers have it: the V2 runner's check refuses the V1 runner's custom logits processors."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    assert not build_vllm_config(Settings.model_validate({"mode": mode}), demo_models().target_dir).use_v2_model_runner


def test_a_process_with_a_gpu_never_loads_what_replaces_cudas_functions() -> None:
    """Our worker of CPUs imports it, and is known to others by name alone."""
    naming = {
        file.name
        for file in (ROOT / "backend").rglob("*.py")
        if re.search(r"^\s*(from|import) .*(cpu_?worker|worker\.cpu)", file.read_text(), re.M)
    }
    assert naming <= {"cpu_worker.py", "paced_worker.py"}
    assert naming


def test_a_target_that_sees_is_served_without_its_eyes() -> None:
    """The gateway would fetch what requests name as pictures, and vLLM's cache of them assumes one engine."""
    for settings in (Settings(), Settings(mode="off")):
        assert engine_arguments(settings, demo_models())["language_model_only"]
    assert build_vllm_config(Settings(), str(TARGET_DIR)).model_config.multimodal_config is None
    assert MultiModalConfig(language_model_only=True).get_limit_per_prompt("image") == 0


@pytest.mark.parametrize(("mode", "eager", "refused"), [("sync", False, True), ("sync", True, False), ("off", False, False)])
def test_recurrent_layers_are_refused_where_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch, mode: str, eager: bool, refused: bool
) -> None:
    monkeypatch.setattr(ModelConfig, "has_inner_state", True)
    settings = Settings.model_validate({"mode": mode, "verifier": {"engine_args": {"enforce_eager": eager}}})
    with pytest.raises(EngineSetupError, match="recurrent layers") if refused else contextlib.nullcontext():
        build_config(settings, demo_models())
