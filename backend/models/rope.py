"""Frequencies of rotary position embeddings, scaling included.  Drafter process."""

import math

import torch
from torch import Tensor

from backend.models.head_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """`[head_dim / 2]`, float64.  Llama 3's scaling stretches long wavelengths and leaves short ones as they are."""
    base = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "default":
        return base
    factor = float(rope.scaling["factor"])
    if rope.kind == "linear":
        return base / factor
    low, high = float(rope.scaling["low_freq_factor"]), float(rope.scaling["high_freq_factor"])
    original = float(rope.scaling["original_max_position_embeddings"])
    turns = original * base / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns >= high).double()
    return base * (blend + (1 - blend) / factor)
