"""Makes the heads that learning starts from.  Launcher's process.

`--drafter grow` starts from the target's own last layer, as an EAGLE-3 head.  Its features are three hidden states of the
target; the last of them is the target's final hidden state.  At first `fc` passes on only that one, and attention ignores
embeddings.  So the head begins as a repetition of the target's last layer, and has to learn which token comes after the next
(`backend/learning/`).  Embeddings and output matrix are the target's and not stored.

A given head starts as it is.  Training needs the target's last hidden state, so a head without it is widened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.models.head_config import FAMILIES, MODELOPT, CheckpointError, load_config, read_config, text_config
from backend.models.tensor_files import TensorFiles
from backend.models.writing import replacing, speculators_config, write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

NORMALISING = "qwen3"
"""The family that normalises queries and keys."""
KEPT = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "vocab_size",
)
COPIED = (
    "input_layernorm.weight",
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    "post_attention_layernorm.weight",
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
COPIED_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
ATTENTION_INPUTS = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkv")
"""The head's weights that read an embedding in their first half, and a feature in their second."""


def feature_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs are features, in a target of so many.  The last, `layers`, is the input of the final norm."""
    early = min(2, layers - 2)
    return early, max(layers // 2, early + 1), layers


def write_initial_head(target_dir: str, directory: Path, name: str) -> None:
    """Writes a head for the target `name` to `directory`, in speculators' layout.  Raises `CheckpointError`, `OSError`."""
    target = text_config(outer := read_config(target_dir))
    quantised = outer.get("quantization_config") or target.get("quantization_config")
    if quantised or (Path(target_dir) / MODELOPT).is_file():
        raise CheckpointError(f"{target_dir}: no head can be made of quantised layers: give an unquantised copy of the model")
    try:
        config = _config(target, name)
        tensors = _tensors(target, TensorFiles(target_dir), target_dir)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{target_dir}/config.json: {type(error).__name__}: {error}") from error
    with replacing(directory) as fresh:
        write_checkpoint(fresh, config, tensors)


def write_widened_head(head_dir: str, target_dir: str, directory: Path) -> None:
    """Writes a copy of a head that also reads the target's last hidden state, with weights of 0: its drafts are the same.

    Raises `CheckpointError`, `OSError`.
    """
    import torch

    head, config, files = load_config(head_dir, target_dir), read_config(head_dir), TensorFiles(head_dir)
    layers = [*head.aux_layers, int(text_config(read_config(target_dir))["num_hidden_layers"])]
    config["eagle_aux_hidden_state_layer_ids"] = layers
    # vLLM reads the number from the layer's configuration.
    config.get("transformer_layer_config", config)["num_aux_hidden_states"] = len(layers)
    tensors = files.read_many(list(files.tensors))
    fc = files.canonical_names["fc.weight"]
    tensors[fc] = torch.cat((tensors[fc], tensors[fc].new_zeros(head.hidden_size, head.target_hidden_size)), dim=1)
    with replacing(directory) as fresh:
        write_checkpoint(fresh, config, tensors)


def _config(target: Mapping[str, Any], name: str) -> dict[str, Any]:
    family, layers = target.get("model_type"), int(target["num_hidden_layers"])
    if family not in FAMILIES:
        raise ValueError(f"no head can be made of the layers of a {family!r} model (of {', '.join(FAMILIES)} it can)")
    if layers < 2:
        raise ValueError("a target of one layer has no three hidden states to draft from")
    heads, hidden = int(target["num_attention_heads"]), int(target["hidden_size"])
    layer = {key: target[key] for key in KEPT if target.get(key) is not None} | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": int(target.get("head_dim") or hidden // heads),
        "hidden_act": target.get("hidden_act", "silu"),
        "mlp_bias": False,
        "model_type": family if family == NORMALISING else "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": str(target.get("dtype") or target.get("torch_dtype") or "float32"),
    }
    return speculators_config(layer, feature_layers(layers), name, target.get("architectures") or ["LlamaForCausalLM"])


def _tensors(target: Mapping[str, Any], files: TensorFiles, where: str) -> dict[str, Tensor]:
    def read(name: str) -> Tensor:
        found = files.find(name)
        if found is None:
            raise CheckpointError(f"{where}: missing tensor: {name}")
        return files.read(found)

    last = f"layers.{int(target['num_hidden_layers']) - 1}"
    names = [*COPIED, *(COPIED_NORMS if target["model_type"] == NORMALISING else ())]
    return repeated_layer({name: read(f"{last}.{name}") for name in names}, read("norm.weight"))


def repeated_layer(layer: Mapping[str, Tensor], norm: Tensor) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 head that repeats a target's layer: `fc` passes on the last of three features.

    `layer`: the layer's tensors, by their names in it; `norm`: the target's final norm.
    """
    import torch

    hidden = len(norm)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors["layers.0.hidden_norm.weight"] = tensors["layers.0.input_layernorm.weight"]
    tensors["layers.0.input_layernorm.weight"] = torch.ones_like(norm)
    for name in ATTENTION_INPUTS:
        tensors[name] = torch.cat((torch.zeros_like(tensors[name]), tensors[name]), dim=1)
    passed_on = torch.eye(hidden, dtype=norm.dtype, device=norm.device)
    return tensors | {"norm.weight": norm, "fc.weight": torch.cat((norm.new_zeros(hidden, 2 * hidden), passed_on), dim=1)}
