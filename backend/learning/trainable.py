"""Reads an EAGLE-3 head's directory into a module to train, and writes it back.  Trainer's process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, Qwen3Config

from backend.learning.head import Drafter
from backend.models.check import final_norm
from backend.models.checkpoint import borrow, load_drafter
from backend.models.head_config import CheckpointError, read_config, text_config
from backend.models.tensor_files import LM_HEAD, TensorFiles
from backend.models.writing import replacing, write_checkpoint

LONGEST = 1024
"""Only the last 1024 rows of a sequence are trained on."""


@dataclass
class Pupil:
    """A head in training, with the target's tensors that it is trained against."""

    drafter: Drafter
    norm: Tensor
    """Weight of the target's final norm, `[hidden]`."""
    eps: float
    place: int
    """Index, among the joined features, of the target's last hidden state."""
    output: Tensor
    """The target's output matrix, `[draft vocabulary, hidden]`: only the rows of tokens that the head can draft."""
    own_ids: Tensor
    """`[vocab]`: each token's id in the draft vocabulary, -1 for tokens outside it."""
    stored: dict[str, Tensor]
    """All tensors of the head's files, under their names there."""
    names: dict[str, str]
    """Canonical name -> name in the files."""
    config: dict[str, Any]
    """The head's `config.json`, kept because its directory may be gone when the head is written."""

    def goals(self, features: Tensor) -> Tensor:
        """The target's scores `[..., draft vocabulary]` for the token that follows each feature's position."""
        last = features.chunk(len(self.drafter.feature_layers), dim=-1)[self.place]
        normed = functional.rms_norm(last.float(), last.shape[-1:], self.norm, self.eps)
        return functional.linear(normed.to(self.output.dtype), self.output).float()


def load_pupil(head_dir: str, target_dir: str, device: torch.device, newer_file: str = "") -> Pupil:
    """Reads a head to be trained, one that can learn (`why_not_learning`).  Raises `CheckpointError`.

    `newer_file`: target tensors that replace those in the target's directory; empty: none.
    """
    newer = load_file(newer_file) if newer_file else {}
    target = text_config(read_config(target_dir))
    layers = int(target["num_hidden_layers"])
    weights = load_drafter(head_dir, target_dir, raw=True, newer=newer)
    config = weights.config
    kind = Qwen3Config if config.model_type == "qwen3" else LlamaConfig
    layer = kind(
        vocab_size=config.draft_vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={**config.rope.scaling, "rope_type": config.rope.kind, "rope_theta": config.rope.theta},
    )
    # Half precision is slow on a CPU.
    frozen = torch.float32 if device.type == "cpu" else weights.embedding.dtype
    drafter = Drafter(layer, config.aux_layers, weights.embedding.to(device, frozen)).to(device)
    assert weights.projection is not None
    state = {name: tensor.float() for name, tensor in weights.tensors.items()}
    drafter.load_state_dict(state | {"fc.weight": weights.projection.weight.float(), "lm_head.weight": weights.lm_head.float()})
    # The output matrix is often the larger part of a head.  It is not trained: it fits the target as it is.
    drafter.lm_head.weight = torch.nn.Parameter(weights.lm_head.to(device, frozen), requires_grad=False)
    mapping = weights.draft_to_target
    ids = torch.arange(config.draft_vocab_size) if mapping is None else mapping
    own_ids = torch.full((config.vocab_size,), -1)
    own_ids[ids] = torch.arange(config.draft_vocab_size)
    head_files = TensorFiles(head_dir)
    return Pupil(
        drafter,
        _final_norm(target_dir, newer).float().to(device),
        float(target.get("rms_norm_eps", 1e-6)),
        config.aux_layers.index(layers),
        borrow(target_dir, LM_HEAD, newer)[ids].to(device, frozen),
        own_ids.to(device),
        head_files.read_many(list(head_files.tensors)),
        head_files.canonical_names,
        read_config(head_dir),
    )


def _final_norm(target_dir: str, newer: Mapping[str, Tensor]) -> Tensor:
    if (renewed := newer.get("norm.weight")) is not None:
        return renewed
    files = TensorFiles(target_dir)
    if (name := final_norm(files)) is None:
        raise CheckpointError(f"{target_dir}: missing tensor: model.norm.weight")
    return files.read(name)


def trained_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors that training changes, by canonical name."""
    return {name: tensor for name, tensor in drafter.state_dict().items() if not name.startswith("lm_head.")}


def save_pupil(pupil: Pupil, tensors: dict[str, Tensor], directory: Path) -> None:
    """Writes a head: these trained tensors, and everything else as in the head that was read.  Raises `OSError`."""
    changed = {pupil.names[name]: tensor for name, tensor in tensors.items()}
    kept = {name: changed[name].to(old.dtype) if name in changed else old for name, old in pupil.stored.items()}
    with replacing(directory) as fresh:
        write_checkpoint(fresh, pupil.config, kept)
