"""Rotary position embedding as one complex multiplication.  Drafter thread.

The checkpoint pairs dimension i with i + head_dim/2.  Reordering the output rows of the query and key projections once, so
that pairs lie side by side, leaves every dot product unchanged and makes a rotation a complex product (RoFormer, section 3.4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from backend.models.head_config import Rope
from backend.models.rope import inverse_frequencies


def rotation_table(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """`[positions, 1, head_dim / 2]`, complex64: the rotation of every position."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


def pair_order(head_dim: int) -> Tensor:
    """`[head_dim]`: for each dimension of the paired order, its index in the checkpoint's order."""
    half = torch.arange(head_dim // 2)
    return torch.stack((half, half + head_dim // 2), dim=1).flatten()


def rotate_(vectors: Tensor, rotations: Tensor) -> None:
    """Rotates `[rows, heads, head_dim]` (paired order) in place by `[rows, 1, head_dim / 2]`."""
    pairs = vectors.view(*vectors.shape[:-1], -1, 2)
    if vectors.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        turned = torch.view_as_complex(pairs.float()) * rotations
        pairs.copy_(torch.view_as_real(turned))
