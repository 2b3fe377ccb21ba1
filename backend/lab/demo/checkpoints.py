"""Reads and writes the demo models: a transformers checkpoint for the target, the speculators layout for the drafter.

Owns the mapping between the modules of this package and the files that transformers and vLLM read.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from backend.lab.demo.model import Target
from backend.lab.demo.tokenizer import BEGIN_ID, END_ID, PAD_ID
from backend.learning.head import Drafter
from backend.learning.layers import Shape
from backend.models.writing import WEIGHTS, speculators_config, write_checkpoint, write_json


def llama_config(shape: Shape, layers: int, tied: bool) -> dict[str, Any]:
    """The `config.json` of a Llama of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def save_target(target: Target, directory: Path) -> None:
    """Write config, generation config and weights, in the weights' own dtype; `directory` must exist."""
    shape = target.shape
    dtype = str(target.model.embed_tokens.weight.dtype).removeprefix("torch.")
    config = llama_config(shape, shape.num_hidden_layers, tied=True) | {"torch_dtype": dtype}
    write_checkpoint(directory, config, target.state_dict())
    tokens = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    # The default for requests without a temperature: a model this small repeats itself when decoded greedily.
    generation = {**tokens, "do_sample": True, "temperature": 0.8}
    write_json(directory / "generation_config.json", generation)


def load_target(directory: Path) -> Target:
    """The target that `save_target` wrote to `directory`."""
    config: Mapping[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    target = Target(Shape(**{name: config[name] for name in Shape.__dataclass_fields__ if name in config}))
    target.load_state_dict(load_file(directory / WEIGHTS))
    return target


def save_drafter(drafter: Drafter, directory: Path, verifier: str) -> None:
    """Write the drafter in the speculators layout; `verifier` names the target it belongs to."""
    shape = drafter.shape.layer
    layer = llama_config(shape, layers=1, tied=False)
    config = speculators_config(layer, drafter.shape.feature_layers, verifier, ["LlamaForCausalLM"])
    write_checkpoint(directory, config, drafter.state_dict())
