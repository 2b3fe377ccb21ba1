"""Makes the demo's target larger without changing what it computes.  Any process; reads and writes checkpoints only.

A benchmark needs targets of several costs, and a head that drafts well for each.  Two changes keep a trained model's function
and give a verifier the work of a larger model.  Additional layers with zero `o_proj` and `down_proj` add nothing to the
residual stream.  Additional MLP columns with a zero part of `down_proj` are computed and then ignored.  All other new weights
are random, so that zero pages or denormals do not make them cheaper than trained weights.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.init import zeros_
from transformers import LlamaConfig, LlamaForCausalLM

from backend.models.head_config import read_config
from backend.models.writing import WEIGHTS, write_checkpoint

SIZES: Mapping[str, tuple[int, int]] = {"S": (6, 2176), "L": (16, 9664)}
"""Layers and MLP width of the widened targets, which have 12 and 122 million parameters."""


def widen(source: Path, destination: Path, layers: int, width: int) -> None:
    """Writes the Llama in `source`, with `layers` layers and MLP width `width`, to the new directory `destination`.

    Logits stay the same except for the rounding of longer sums.
    """
    config = read_config(str(source)) | {"num_hidden_layers": layers, "intermediate_size": width}
    small = LlamaForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    wide = LlamaForCausalLM(LlamaConfig.from_dict(config))
    with torch.no_grad():
        for layer in wide.model.layers:
            zeros_(layer.self_attn.o_proj.weight)
            zeros_(layer.mlp.down_proj.weight)
        for name, own in small.named_parameters():
            wide.get_parameter(name)[tuple(slice(size) for size in own.shape)] = own
    shutil.copytree(source, destination, ignore=shutil.ignore_patterns(WEIGHTS))
    write_checkpoint(destination, config, dict(wide.named_parameters()))
