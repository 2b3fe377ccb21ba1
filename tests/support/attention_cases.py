"""Random rows with what they attend to, and their attention by definition.  Tests only."""

import torch
from torch import Tensor
from torch.nn import functional

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


def attend_one_by_one(queries: Tensor, cache: Tensor, reach: Reach) -> Tensor:
    """The definition of `backend.drafter.attention.attend`."""
    found = []
    for query, *numbers in zip(queries, *(each.tolist() for each in reach.columns()), strict=True):
        place, start, bound, tail, stride = numbers
        at = place - start
        seen = [start + o for o in range(at + 1) if o < bound or (o >= tail and (at - o) % stride == 0)]
        keys, values = cache[seen].transpose(0, 2).unbind(1)
        found.append(functional.scaled_dot_product_attention(query.unsqueeze(1), keys, values, enable_gqa=True).squeeze(1))
    return torch.stack(found)
