"""Reads what a drafter's head shares with the target from vLLM's model, in parts.  Worker process, every rank.

New weights may come by directory, wire or transfer engine; the model has all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backend.engine.features import DTYPE_NAMES
from backend.wire.drafting import Part, TargetTensor

PART_BYTES = 4 * 2**20
"""Read and sent at once, between two steps."""
LENT: dict[TargetTensor, TargetTensor] = {"lm_head.weight": "embed_tokens.weight"}
"""Read instead if the first is missing: an output matrix tied to the embedding has no name."""


def read(model: nn.Module, name: TargetTensor, first: int, rank: int, ranks: int) -> tuple[Part, bytes] | None:
    """Reads at most `PART_BYTES` of a tensor, from row `first` on.  None while the weights are being exchanged.

    The part has the rows of all ranks, the bytes those of this rank.  `Part.of` is 0 if the model has no such tensor in a dtype
    that can be sent.  Each rank holds consecutive rows of a matrix, or the whole of a vector.
    """
    tensor = _find(model, name)
    if tensor is not None and tensor.is_meta:
        return None
    if tensor is None or tensor.dtype not in DTYPE_NAMES:
        return Part(name, first, 0, 0, 0, "float32"), b""
    shard = tensor.detach()
    if shard.dim() == 1:
        # A vector counts as one row, which the first rank sends.
        shard, ranks = shard[None], 1
    held, width = len(shard), shard.shape[1]
    of = held * ranks
    rows = max(min(max(PART_BYTES // (width * shard.element_size()), 1), of - first), 0)
    own = shard[max(first - rank * held, 0) : max(first + rows - rank * held, 0)].contiguous().cpu()
    return Part(name, first, rows, of, width, DTYPE_NAMES[tensor.dtype]), own.view(torch.uint8).numpy().tobytes()


def _find(model: nn.Module, name: TargetTensor) -> Tensor | None:
    """The parameter with the shortest name that ends in `name`; adapters wrap the layers they change."""
    found = {each.replace(".base_layer.", "."): tensor for each, tensor in model.named_parameters()}
    wanted = [each for each in found if each == name or each.endswith(f".{name}")]
    if wanted:
        return found[min(wanted, key=len)]
    return _find(model, LENT[name]) if name in LENT else None
