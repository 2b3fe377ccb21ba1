"""Weights as tensors: those that come over our own wire, and those that drafters share with the target.  Worker process.

In: a vLLM weight transfer engine for safetensors bytes, some tensors at a time.  `verifier.engine_args.weight_transfer_config`
selects one of vLLM's own instead (NCCL, CUDA IPC, ...).

Out: what a drafter's head shares with the target, in parts, on every rank.  However new weights came, vLLM's model has them.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from backend.engine.row_log import DTYPE_NAMES
from backend.models.layout import Shape
from backend.wire.drafting import Part, TargetTensor

NAME = "outrider_wire"
PART_BYTES = 4 * 2**20
"""Read and sent at once, between two steps."""
LENT: dict[TargetTensor, TargetTensor] = {"lm_head.weight": "embed_tokens.weight"}
"""Read instead if the first is missing: an output matrix tied to the embedding has no name."""


@dataclass
class Tensors(WeightTransferUpdateInfo):
    """Some of the checkpoint's tensors, as a safetensors file holds them."""

    tensors: bytes
    skipped: list[str]
    """Those of them that have come before."""


class WireTransfer(WeightTransferEngine[WeightTransferInitInfo, Tensors]):
    """Loads tensors from the bytes it gets; there is nothing to connect."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = Tensors
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class's method synchronizes an accelerator, even where there is none.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Tensors) -> None:
        # Of a layer, vLLM keeps what has come until all has.  A GPU whose memory the KV cache fills has no room for that.
        self.model.load_weights(
            (name, tensor) for name, tensor in load(update_info.tensors).items() if name not in update_info.skipped
        )
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(NAME, WireTransfer)


def forget(model: torch.nn.Module, model_config: Any) -> None:
    """Ends a load that stays incomplete.  A layer keeps its earlier weights unless all of its new ones had come.

    vLLM keeps what has come of a layer for the next load, which would mix it with that load's weights.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel = 0
        info.loaded_weights.clear()
    finalize_layerwise_reload(model, model_config)


def shapes_in(data: bytes) -> dict[str, Shape]:
    """The shapes, by name, of the tensors in a safetensors file's bytes.  Raises `ValueError` for other bytes.

    Reads the header alone: `safetensors.deserialize` copies every tensor, 9 ms for 16 MiB, while the engine is paused.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        shapes = {name: tuple(each["shape"]) for name, each in header.items()}
        last = max((each["data_offsets"][1] for each in header.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError("these are no safetensors") from error
    if len(data) < 8 or not shapes or len(data) != 8 + length + last or not all(map(_is_shape, shapes.values())):
        raise ValueError("these are no safetensors")
    return shapes


def _is_shape(shape: Shape) -> bool:
    return all(isinstance(each, int) and each >= 0 for each in shape) and math.prod(shape) >= 0


def read_rows(model: nn.Module, name: TargetTensor, first: int, rank: int, ranks: int) -> tuple[Part, bytes] | None:
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
    # Other modules have norms, too, Qwen3-VL's vision tower for one.
    suffix = "model.norm.weight" if name == "norm.weight" else name
    found = {each.replace(".base_layer.", "."): tensor for each, tensor in model.named_parameters()}
    wanted = [each for each in found if each == suffix or each.endswith(f".{suffix}")]
    if wanted:
        return found[min(wanted, key=len)]
    return _find(model, LENT[name]) if name in LENT else None
