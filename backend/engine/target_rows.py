"""Reads what a drafter's head shares with the target out of vLLM's model, some rows at a time.  Worker process, every rank.

Whichever way new weights came, by directory, wire or a transfer engine, this is where all of them are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backend.engine.features import DTYPE_NAMES
from backend.wire.drafting import FeatureDtype, TargetTensor

PART_BYTES = 4 * 2**20
"""Read and sent in one go, between two steps."""
LENT: dict[TargetTensor, TargetTensor] = {"lm_head.weight": "embed_tokens.weight"}
"""Where an output matrix that is tied to the embedding is found."""


@dataclass(frozen=True)
class TargetRows:
    """Rows `first` and on of a tensor `[of, width]`: how many all ranks have of them together, and those of this rank."""

    rows: int
    of: int
    width: int
    dtype: FeatureDtype
    data: bytes


def read(model: nn.Module, name: TargetTensor, first: int, rank: int, ranks: int) -> TargetRows | None:
    """At most `PART_BYTES` of it; `of` is 0 where the model has none in a type that travels.

    Ranks hold consecutive rows of a matrix, and each the whole of a vector.  None while the weights are being exchanged.
    """
    tensor = _find(model, name)
    if tensor is not None and tensor.is_meta:
        return None
    if tensor is None or tensor.dtype not in DTYPE_NAMES:
        return TargetRows(0, 0, 0, "float32", b"")
    shard = tensor.detach()
    if shard.dim() == 1:
        # Its one row is the first rank's.
        shard, ranks = shard[None], 1
    held, width = len(shard), shard.shape[1]
    of = held * ranks
    rows = max(min(max(PART_BYTES // (width * shard.element_size()), 1), of - first), 0)
    own = shard[max(first - rank * held, 0) : max(first + rows - rank * held, 0)].contiguous().cpu()
    return TargetRows(rows, of, width, DTYPE_NAMES[tensor.dtype], own.view(torch.uint8).numpy().tobytes())


def _find(model: nn.Module, name: TargetTensor) -> Tensor | None:
    """The parameter with the shortest name that ends so; adapters wrap the layers they change."""
    found = {each.replace(".base_layer.", "."): tensor for each, tensor in model.named_parameters()}
    wanted = [each for each in found if each == name or each.endswith(f".{name}")]
    if wanted:
        return found[min(wanted, key=len)]
    return _find(model, LENT[name]) if name in LENT else None
