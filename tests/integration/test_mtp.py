"""A target that brings a layer for multi-token prediction drafts for itself, on a drafter and in vLLM, and says the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.sampling_params import SamplingParams

from backend.config import Settings
from backend.models.demo import TARGET_DIR
from backend.models.resolve import ModelError, ResolvedModels, resolve
from tests.support.processes import Drafter, Verifier, generate_on, together

pytestmark = pytest.mark.engine

HIDDEN, INNER, HEADS, VOCAB, K = 64, 96, 2, 2048, 4
PROMPTS = [[7 + 31 * i + j for j in range(5 + i)] for i in range(6)]


def block(prefix: str) -> dict[str, Tensor]:
    """A block that adds nothing, so that the next token follows from the last one alone."""
    ones, square = torch.ones(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    projections = {f"self_attn.{name}_proj.weight": torch.randn(HIDDEN, HIDDEN) for name in "qkv"}
    biases = {f"self_attn.{name}_proj.bias": torch.randn(HIDDEN) for name in "qkv"}
    rest = {
        "self_attn.o_proj.weight": square,
        "mlp.gate_proj.weight": torch.randn(INNER, HIDDEN),
        "mlp.up_proj.weight": torch.randn(INNER, HIDDEN),
        "mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones.clone(),
    }
    return {prefix + name: tensor.clone() for name, tensor in (projections | biases | rest).items()}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of MiMo's shape whose MTP layer knows what the target will say."""
    directory = tmp_path_factory.mktemp("mimo")
    for file in TARGET_DIR.glob("*token*"):
        shutil.copy(file, directory)
    torch.manual_seed(1)
    names = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "torch_dtype": "float32"}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config: dict[str, object] = {**names, **sizes, "num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 512}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 1}))
    ones = torch.ones(HIDDEN)
    mtp = "model.mtp_layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN),
        "model.norm.weight": ones,
        f"{mtp}token_layernorm.weight": ones.clone(),
        f"{mtp}hidden_layernorm.weight": ones.clone(),
        f"{mtp}final_layernorm.weight": ones.clone(),
        f"{mtp}input_proj.weight": torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)), dim=1),
    }
    for prefix in ("model.layers.0.", "model.layers.1.", mtp):
        tensors |= block(prefix)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def models(target: Path, mode: str) -> ResolvedModels:
    return resolve(Settings.model_validate({"model": str(target), "drafter": "mtp", "mode": mode}), print)


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Iterator[dict[str, Verifier]]:
    directory = tmp_path_factory.mktemp("m")
    common = {"num_speculative_tokens": K, "verifier": {"lookup": False}}
    modes = ("off", "sync", "native")
    started = together(
        *(lambda mode=mode: Verifier(directory, {"mode": mode, **common}, models(target, mode)) for mode in modes),
        lambda: Drafter(directory, models(target, "sync"), gpus=0, cache_tokens=4096),
    )
    *found, drafter = started
    found[1].set_drafters(drafter.ref)
    yield dict(zip(modes, found, strict=True))
    for each in started:
        each.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_the_layer_change_no_text_and_are_right(verifiers: dict[str, Verifier], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=40, ignore_eos=True)
    names = ["off", "sync"] if temperature else list(verifiers)
    answers = generate_on([verifiers[name] for name in names], PROMPTS, params)
    texts = [[answer.tokens for answer in each] for each in answers]
    assert all(each == texts[0] for each in texts)
    for name in names[1:]:
        counters = list(verifiers[name].client.fresh_stats().drafters.values())
        drafted, accepted = (sum(getattr(each, field) for each in counters) for field in ("draft_tokens", "accepted_tokens"))
        assert accepted > 0.9 * drafted > 0, (name, drafted, accepted)


def test_a_model_without_such_layers_or_of_another_family_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ModelError, match="no layers for multi-token prediction"):
        models(TARGET_DIR, "sync")
    other = shutil.copytree(target, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["DeepseekV3ForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="DeepseekV3ForCausalLM are not supported, only of MiMoForCausalLM"):
        models(other, "sync")
