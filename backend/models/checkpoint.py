"""Loads a head or a draft model from a directory.  Drafter process; the verifier also uses `load_fc`.

A head without embeddings or output matrix of its own uses the target's (only these tensors of the target are read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from backend.models.check import misshapen
from backend.models.head_config import DRAFT_MODEL, CheckpointError, HeadConfig, load_config, read_config, text_config
from backend.models.layout import required_tensors
from backend.models.tensor_files import EMBEDDING, LM_HEAD, TensorFiles
from backend.models.vocabulary import shared_tokens
from backend.wire.drafting import TargetTensor

BORROWED: frozenset[TargetTensor] = frozenset(("embed_tokens.weight", "lm_head.weight"))
"""What a head takes from its target unless it has its own."""


@dataclass(frozen=True)
class HeadWeights:
    """A drafter's tensors under canonical names (`layers.0.self_attn.q_proj.weight`, ...), on the CPU, as stored.

    `embedding` is `[vocab, hidden]`, `lm_head` `[draft_vocab, hidden]`.  `draft_to_target` `[draft_vocab]`, int64, maps ids of
    the draft vocabulary to the target's; None if both vocabularies are the same.  A draft model with another vocabulary is
    brought into this form: its embedding in the order of the target's ids, its output matrix cut down to the shared tokens.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    embedding: Tensor
    lm_head: Tensor
    draft_to_target: Tensor | None
    max_position: int
    """The target's longest position; for a draft model at most its own.  A head's own limit is ignored: it is often a default
    that was never adapted."""
    borrowed: frozenset[TargetTensor]
    """Which of embedding and output matrix a head lacks and takes from its target."""
    projection: FcProjection | None
    """The projection that the drafter has to apply to features; None: verifiers have applied it, or there is none."""


def load_drafter(head_dir: str, target_dir: str, raw: bool = False, newer: Mapping[str, Tensor] = {}) -> HeadWeights:
    """Reads a head or a draft model; with `raw`, a head's projection, too.

    `newer`: target tensors that replace those in the target's directory, see `HeadWeights.borrowed`.
    Raises `CheckpointError`, which names the first misfit.
    """
    config, files = load_config(head_dir, target_dir), TensorFiles(head_dir)
    if misfits := [*config.unsupported, *misshapen(config, files, target_dir)]:
        raise CheckpointError(f"{head_dir}: {misfits[0]}")
    names = files.canonical_names.keys()
    keep = required_tensors(config).keys() | {n for n in names if n.endswith(".bias")} | ({EMBEDDING, LM_HEAD} & names)
    if config.kind != "eagle":
        # EAGLE-3's `fc` is applied by the verifier, or read as `projection` below.  EAGLE-1's also reads the embedding.
        keep = {n for n in keep if not n.startswith(("fc.", "fc_norm."))}
    tensors = files.read_canonical(keep)
    borrowed = BORROWED - tensors.keys()
    embedding, lm_head, offsets = (tensors.pop(name, None) for name in (EMBEDDING, LM_HEAD, "d2t"))
    mapping = _target_ids(offsets, config) if offsets is not None else None
    longest = int(text_config(read_config(target_dir)).get("max_position_embeddings") or config.max_position)
    if config.kind == DRAFT_MODEL:
        assert embedding is not None, "a language model has one"
        lm_head = embedding if lm_head is None else lm_head
        borrowed = frozenset()
        # The target may have tokens that the draft model has nothing for: their embeddings are zero.
        shared = shared_tokens(config, head_dir, target_dir)
        if shared is not None and shared.differ:
            mapping, lm_head = torch.tensor(list(shared.ids)), lm_head[list(shared.ids.values())]
            embedding = functional.pad(embedding, (0, 0, 0, 1))[shared.inputs()]
            config = replace(config, draft_vocab_size=len(mapping))
        else:
            embedding = functional.pad(embedding, (0, 0, 0, max(config.vocab_size - len(embedding), 0)))
        longest = min(longest, config.max_position)
    embedding = borrow(target_dir, EMBEDDING, newer) if embedding is None else embedding
    lm_head = borrow(target_dir, LM_HEAD, newer) if lm_head is None else lm_head
    for name, tensor, tokens in ((EMBEDDING, embedding, config.vocab_size), (LM_HEAD, lm_head, config.draft_vocab_size)):
        # Those of directories were checked above.  More rows are allowed: vocabularies may be padded.
        if newer and (tensor.dim() != 2 or tensor.shape[0] < tokens or tensor.shape[1] != config.hidden_size):
            raise CheckpointError(f"tensor {name}: shape {list(tensor.shape)}, expected {[tokens, config.hidden_size]}")
    projection = load_fc(head_dir) if raw and config.uses_aux else None
    return HeadWeights(config, tensors, embedding, lm_head[: config.draft_vocab_size], mapping, longest, borrowed, projection)


def borrow(target_dir: str, name: str, newer: Mapping[str, Tensor]) -> Tensor:
    """The target's tensor of this name, from `newer` or its directory.  A tied output matrix is the embedding.

    Raises `CheckpointError`.
    """
    if name in newer:
        return newer[name]
    target = TensorFiles(target_dir)
    source = target.find(name)
    if source is None and name == LM_HEAD:
        return borrow(target_dir, EMBEDDING, newer)
    if source is None:
        raise CheckpointError(f"{target_dir}: missing tensor: {name}")
    return target.read(source)


def _target_ids(offsets: Tensor, config: HeadConfig) -> Tensor:
    """The target's ids for the draft vocabulary.  `d2t` holds offsets: draft id i is the target's i + d2t[i]."""
    ids = offsets.to(torch.int64) + torch.arange(config.draft_vocab_size)
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()):
        raise CheckpointError("tensor d2t: points outside the target's vocabulary")
    if len(set(ids.tolist())) != len(ids):
        raise CheckpointError("tensor d2t: names a token of the target twice")
    return ids


@dataclass(frozen=True)
class FcProjection:
    """EAGLE-3's first projection, `fc`.  The verifier usually applies it, so that features on the wire are n times narrower.

    `weight` is `[hidden, n * target_hidden]`.  The n features may be normalised before it: by `input_norm`, one weight over all
    of them (`norm_before_fc`), and by `feature_norms`, one weight each (`fc_norm`).
    """

    weight: Tensor
    bias: Tensor | None
    input_norm: Tensor | None
    feature_norms: tuple[Tensor, ...]
    eps: float
    aux_layers: tuple[int, ...]
    """The target layers whose inputs are the features; empty: the head's configuration names none, the default applies."""

    def to(self, device: torch.device | str, dtype: torch.dtype) -> FcProjection:
        """A copy on `device`, of type `dtype`."""
        moved: dict[str, Any] = {name: part.to(device, dtype) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, feature_norms=tuple(norm.to(device, dtype) for norm in self.feature_norms), **moved)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Projects raw features `[rows, n * target_hidden]` to those that the head's layer takes, `[rows, hidden]`."""
        if self.input_norm is not None:
            hidden = functional.rms_norm(hidden, hidden.shape[-1:], self.input_norm, self.eps)
        if self.feature_norms:
            parts = hidden.chunk(len(self.feature_norms), dim=-1)
            normed = [
                functional.rms_norm(part, part.shape[-1:], norm, self.eps)
                for part, norm in zip(parts, self.feature_norms, strict=True)
            ]
            hidden = torch.cat(normed, dim=-1)
        return functional.linear(hidden, self.weight, self.bias)


def load_fc(head_dir: str) -> FcProjection:
    """Reads a head's `fc` alone.  Raises `CheckpointError`, also for a head without one (see `HeadConfig.uses_aux`)."""
    config = load_config(head_dir)
    if not config.uses_aux:
        raise CheckpointError(f"{head_dir}: this head takes the target's last hidden state; it has no projection")
    files = TensorFiles(head_dir)
    tensors = files.read_canonical([n for n in files.canonical_names if n.startswith(("fc.", "fc_norm.", "input_norm."))])
    try:
        weight = tensors["fc.weight"]
        count = weight.shape[1] // config.target_hidden_size
        feature_norms = tuple(tensors[f"fc_norm.{i}.weight"] for i in range(count)) if config.fc_norm else ()
        input_norm = tensors["input_norm.weight"] if config.norm_before_fc else None
    except KeyError as error:
        raise CheckpointError(f"{head_dir}: missing tensor: {error.args[0]}") from error
    return FcProjection(weight, tensors.get("fc.bias"), input_norm, feature_norms, config.rms_norm_eps, config.aux_layers)
