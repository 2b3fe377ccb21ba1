"""Random rows with what they attend to.  Tests only."""

import torch
from torch import Tensor

from backend.drafter.attention import Reach


def attention_case(rows: int, heads: int, kv_heads: int, dim: int, longest: int, seed: int) -> tuple[Tensor, Tensor, Reach]:
    """Queries, a cache, and rows of any reach into stretches of up to `longest` rows."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    room = longest + 3
    starts = torch.arange(rows) * room
    at = torch.randint(0, longest, (rows,), generator=generator)
    strides = torch.randint(1, 5, (rows,), generator=generator)
    tails = ((at + 1) * torch.rand(rows, generator=generator)).long()
    bounds = ((tails + 1) * torch.rand(rows, generator=generator)).long()
    cache = torch.randn(rows * room, 2, kv_heads, dim, generator=generator)
    return torch.randn(rows, heads, dim, generator=generator), cache, Reach(starts + at, starts, bounds, tails, strides)
