"""Makes a Llama-style target larger without changing what it computes.  Any process; reads and writes checkpoints only.

A benchmark needs targets of several costs, and a head that drafts well for each.  Two changes keep a trained model's function
and give a verifier the work of a larger model.  Additional layers with zero `o_proj` and `down_proj` add nothing to the
residual stream.  Additional MLP columns with a zero part of `down_proj` are computed and then ignored.  All other new weights
are random, so that zero pages or denormals do not make them cheaper than trained weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend.models.head_config import load_config, read_config
from backend.models.tensor_files import TensorFiles
from backend.models.writing import write_checkpoint, write_json

NOT_COPIED = (".safetensors", ".bin", ".pt", ".safetensors.index.json", ".bin.index.json")
SCALE = 0.02


class WidenError(Exception):
    """The model cannot be widened; the message is one line."""


@dataclass(frozen=True)
class Preset:
    """Size to widen a target to; the target keeps its own number of layers and MLP width if these are larger."""

    layers: int
    parameters: int
    """Approximate number of parameters in all; the MLP's width is derived from it."""


PRESETS: Mapping[str, Preset] = {
    "S": Preset(layers=6, parameters=12_000_000),
    "L": Preset(layers=16, parameters=123_000_000),
}
WIDTH_MULTIPLE = 64


def widen_pair(target: Path, head: Path | None, preset: Preset, into: Path) -> tuple[Path, Path | None]:
    """Writes the widened target, and the head if its feature layers follow from the target's depth: then they are spelled out.

    Returns both directories; a head that needs no change stays in its own.  Raises `WidenError`.
    """
    wide = into / "target"
    config = read_config(str(target))
    layers = max(preset.layers, int(config["num_hidden_layers"]))
    widen(target, wide, layers, width_for(config, layers, preset.parameters))
    if head is None:
        return wide, None
    before = load_config(str(head), str(target)).aux_layers
    if load_config(str(head), str(wide)).aux_layers == before:
        return wide, head
    named = into / "head"
    shutil.copytree(head, named)
    outer = read_config(str(head)) | {"eagle_aux_hidden_state_layer_ids": list(before)}
    write_json(named / "config.json", outer)
    return wide, named


def width_for(config: Mapping[str, Any], layers: int, parameters: int) -> int:
    """The MLP width at which a Llama of this configuration with `layers` layers has about `parameters` parameters."""
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    width = (parameters - embeddings - layers * attention) // (3 * hidden * layers)
    return max(width // WIDTH_MULTIPLE * WIDTH_MULTIPLE, int(config["intermediate_size"]))


def widen(source: Path, destination: Path, layers: int, width: int, seed: int = 0) -> None:
    """Writes the model in `source`, with `layers` layers and MLP width `width`, to the new directory `destination`.

    Logits stay the same except for the rounding of longer sums.  Raises `WidenError`.
    """
    config = read_config(str(source))
    own_layers, own_width = int(config["num_hidden_layers"]), int(config["intermediate_size"])
    if config.get("model_type") != "llama" or config.get("mlp_bias") or config.get("attention_bias"):
        raise WidenError(f"{source}: only Llama models without biases can be widened")
    if layers < own_layers or width < own_width:
        raise WidenError(f"{source}: has {own_layers} layers of width {own_width}, more than asked for")
    files = TensorFiles(str(source))
    stored = files.read_many(sorted(files.tensors))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _wider(name, value, width, generator) for name, value in stored.items()}
    last = f"model.layers.{own_layers - 1}."
    pattern = {name.removeprefix(last): value for name, value in tensors.items() if name.startswith(last)}
    if not pattern:
        raise WidenError(f"{source}: no tensors called {last}*")
    for layer in range(own_layers, layers):
        for name, value in pattern.items():
            tensors[f"model.layers.{layer}.{name}"] = _silent(name, value, generator)
    destination.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(NOT_COPIED):
            shutil.copyfile(file, destination / file.name)
    write_checkpoint(destination, config | {"num_hidden_layers": layers, "intermediate_size": width}, tensors)


def _wider(name: str, value: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Adds random rows to `gate_proj` and `up_proj` `[own, hidden]`, and zero columns to `down_proj` `[hidden, own]`."""
    if name.endswith(("mlp.gate_proj.weight", "mlp.up_proj.weight")):
        return torch.cat([value, _random((width - value.shape[0], value.shape[1]), value, generator)])
    if name.endswith("mlp.down_proj.weight"):
        return torch.cat([value, value.new_zeros(value.shape[0], width - value.shape[1])], dim=1)
    return value


def _silent(name: str, pattern: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor of an additional layer that adds nothing to the residual stream."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return torch.zeros_like(pattern)
    if pattern.dim() == 1:
        return torch.ones_like(pattern)
    return _random(tuple(pattern.shape), pattern, generator)


def _random(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * SCALE).to(like.dtype)
