"""The arithmetic of an EAGLE head or a draft model and its KV cache, on a CPU or GPU: torch, and `attention/`.  Drafter thread.

Written for small batches, where every operator call and every byte of weights counts.  The embedding's share of layer 0's input
projection is computed per token beforehand (or at least its norm is).  q, k and v are one product.  In the last layer, rows
that no draft starts from contribute keys and values only.  Semantics are those of vLLM's `llama_eagle3` and `llama_eagle`.
A draft model is a head without features: its rows begin as embeddings.

A rotation is one complex multiplication (RoFormer, section 3.4).  Checkpoints pair dimension i with i + head_dim/2.  The output
rows of the query and key projections are reordered once, so that pairs lie side by side.  No dot product changes by that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from backend.drafter.attention import Reach, attend, cpu
from backend.drafter.proposer import MAX_DRAFT
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import DRAFT_MODEL, Rope

TABLE_BYTES = 64 * 2**20
"""Largest table of embeddings projected beforehand by layer 0; larger ones are projected when used."""
ROTATION_BYTES = 256 * 2**20
"""Largest table of rotations, of 524,288 positions where heads have 128 dimensions; others are computed when used."""
TABLE_CHUNK = 8192
"""Embeddings converted at a time; bounds memory."""
QUERY_CHUNK = 512
"""Query rows per attention call of an inner layer over a long stretch; bounds the size of its mask."""
LONG = 32
"""New rows of one sequence from which on an inner layer attends by matrix products, for this sequence alone."""
SPARE_ROWS = MAX_DRAFT + 1
"""Rows at the cache's end for rows that only fill up a batch."""


class Stretch(NamedTuple):
    """A sequence's new rows: its first row in the cache, its rows there with the new ones, and its new rows."""

    start: int
    length: int
    new: int


@dataclass(frozen=True)
class Rows:
    """The input of a forward pass: new rows of several sequences, `[rows]` int64 each: token, position, and what it attends to.

    `stretches`: the sequences with `LONG` new rows or more.  Theirs are the last rows.
    """

    ids: Tensor
    positions: Tensor
    reach: Reach
    stretches: Sequence[Stretch] = ()
    written: Tensor | None = None
    """Where the rows are written, if not at `reach.places`: rows of a block also see later ones."""
    by_layer: Sequence[Reach] = ()
    """What they see in each layer, if it differs."""


@dataclass
class _Layer:
    """One layer; matrices are stored `[in, out]`, which small batches read fastest."""

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Head:
    """The network and its cache of `capacity` rows and a few spare ones, `[layers, rows, 2 * kv_heads * head_dim]`."""

    def __init__(self, weights: HeadWeights, device: torch.device, dtype: torch.dtype, capacity: int, positions: int) -> None:
        config = weights.config
        self.config = config
        self.device, self.dtype = device, dtype
        self.is_asynchronous = device.type == "cuda"
        """Whether operations return before they are done, so that reading a result waits."""
        # Where torch 2.13 prefers cuDNN's attention (compute capability 9.0 and 10.0), each new number of rows takes a plan of
        # some 30 ms, which is kept for ever; here every step has another number.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.query_width = self.heads * self.head_dim
        self._source = weights.tensors
        self._paired_order = torch.arange(self.head_dim).view(2, -1).t().flatten()
        frequencies = _frequencies(config.rope, self.head_dim)
        self._frequencies = frequencies.to(device)
        fits = positions * self.head_dim // 2 * torch.complex64.itemsize <= ROTATION_BYTES
        self._rotations = _rotations(torch.arange(positions), frequencies).to(device) if fits else None
        self.is_eagle3 = config.kind == "eagle3"
        self.takes_features = config.kind != DRAFT_MODEL
        # A head's row p reads the feature at p and the token at p + 1; a draft model's row p reads the token at p.
        self.token_offset = int(self.takes_features)
        self.table, self.table_weight, self.feature_fc = self._input_tables(weights.embedding)
        self.layers = [self._layer_weights(index) for index in range(config.num_layers)]
        self.hidden_norm = self._vector("layers.0.hidden_norm.weight")
        self.norm = self._vector("norm.weight")
        self.lm_head = self._on_device(weights.lm_head.t())
        mapping = weights.draft_to_target
        # A full vocabulary in the target's order needs no mapping, and its noise is drawn faster without.
        is_whole = mapping is None or torch.equal(mapping, torch.arange(weights.config.vocab_size))
        self.draft_to_target = None if mapping is None or is_whole else mapping.to(device)
        self._source = {}
        width = 2 * self.kv_heads * self.head_dim
        self.capacity = capacity
        self.cache = torch.zeros(config.num_layers, capacity + SPARE_ROWS, width, device=device, dtype=dtype)
        self._flat = list(self.cache.unbind(0))
        self._keyed = list(self.cache.view(config.num_layers, -1, 2, self.kv_heads, self.head_dim).unbind(0))

    def move(self, source: int, target: int, rows: int) -> None:
        """Copies rows of the cache in every layer; the two stretches do not overlap."""
        with torch.inference_mode():
            self.cache[:, target : target + rows].copy_(self.cache[:, source : source + rows])

    def forward(self, rows: Rows, features: Tensor | None, keep: Tensor | None) -> Tensor:
        """Computes the rows and writes them to the cache.  Returns `[kept, hidden]`, the outputs before the final norm.

        `features` is `[rows, hidden]`; a draft model ignores it.  `keep`: indices of the rows whose outputs are returned; None:
        all.
        """
        part = self._embed(rows.ids)
        rotations = self._rotations_at(rows.positions)
        written = rows.reach.places if rows.written is None else rows.written
        hidden = part
        if self.takes_features and features is not None:
            hidden = features if self.feature_fc is None else torch.addmm(part, features, self.feature_fc)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            residual, qkv = self._project(index, layer, hidden, part)
            self._rotate(layer, qkv, rotations)
            self._flat[index].index_copy_(0, written, qkv[:, self.query_width :])
            queries, reach = qkv[:, : self.query_width], rows.by_layer[index] if rows.by_layer else rows.reach
            if index == last and keep is not None:
                queries, residual, reach = queries.index_select(0, keep), residual.index_select(0, keep), reach.of(keep)
            if rows.stretches and index < last:
                attended = self._attend_stretches(index, queries, reach, rows.stretches)
            else:
                attended = self._attend(index, queries, reach)
            hidden = self._finish(layer, residual, attended)
        return hidden

    def read(self, output: Tensor) -> Tensor:
        """From outputs `[n, hidden]`: logits `[n, draft vocabulary]` in float32."""
        return (self._normed(output) @ self.lm_head).float()

    def feature(self, output: Tensor) -> Tensor:
        """From outputs `[n, hidden]`: features `[n, hidden]` for the next step."""
        return self._normed(output) if self.config.norm_output else output

    def _normed(self, output: Tensor) -> Tensor:
        return output if self.norm is None else self._rms(output, self.norm)

    def _embed(self, ids: Tensor) -> Tensor:
        part = self.table.index_select(0, ids)
        return part if self.table_weight is None else part @ self.table_weight

    def _project(self, index: int, layer: _Layer, hidden: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's residual, and its queries, keys and values `[rows, query_width + 2 * kv_heads * head_dim]`."""
        if index == 0 and self.hidden_norm is not None:
            normed = self._rms(hidden, self.hidden_norm)
            residual = normed if self.config.norm_before_residual else hidden
            return residual, torch.addmm(part, normed, layer.qkv)
        normed = hidden if layer.input_norm is None else self._rms(hidden, layer.input_norm)
        return hidden, affine(normed, layer.qkv, layer.qkv_bias)

    def _rotations_at(self, positions: Tensor) -> Tensor:
        table = self._rotations
        return _rotations(positions, self._frequencies) if table is None else table.index_select(0, positions)

    def _rotate(self, layer: _Layer, qkv: Tensor, rotations: Tensor) -> None:
        turned = qkv[:, : self.query_width + self.kv_heads * self.head_dim]
        vectors = turned.view(len(qkv), -1, self.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = vectors[:, : self.heads], vectors[:, self.heads :]
            queries.copy_(self._rms(queries, layer.q_norm))
            keys.copy_(self._rms(keys, layer.k_norm))
        rotate_pairs(vectors, rotations)

    def _attend(self, index: int, queries: Tensor, reach: Reach) -> Tensor:
        """Attention of all rows in one call.  In and out: `[rows, query_width]`."""
        return attend(queries.reshape(-1, self.heads, self.head_dim), self._keyed[index], reach).view(-1, self.query_width)

    def _attend_stretches(self, index: int, queries: Tensor, reach: Reach, stretches: Sequence[Stretch]) -> Tensor:
        """Attention of `stretches` one by one, and of the rows before theirs in one call."""
        counts = [each.new for each in stretches]
        others, *pieces = queries.split_with_sizes([len(queries) - sum(counts), *counts])
        attended = [self._attend(index, others, reach.first(len(others)))]
        for piece, (start, length, count) in zip(pieces, stretches, strict=True):
            keys, values = self._keyed[index][start : start + length].permute(1, 2, 0, 3).unsqueeze(1)
            before = length - count
            for part in torch.split(piece, QUERY_CHUNK):
                seen = before + len(part)
                visible = torch.ones(len(part), seen, dtype=torch.bool, device=self.device).tril(before)
                folded = part.view(1, len(part), self.heads, self.head_dim).transpose(1, 2)
                found = functional.scaled_dot_product_attention(
                    folded, keys[:, :, :seen], values[:, :, :seen], visible, enable_gqa=True
                )
                attended.append(found.transpose(1, 2).reshape(len(part), self.query_width))
                before = seen
        return torch.cat(attended)

    def _finish(self, layer: _Layer, residual: Tensor, attended: Tensor) -> Tensor:
        hidden = torch.addmm(residual, attended, layer.out)
        if layer.out_bias is not None:
            hidden = hidden + layer.out_bias
        gate, up = affine(self._rms(hidden, layer.post_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down)
        return hidden if layer.down_bias is None else hidden + layer.down_bias

    def _rms(self, values: Tensor, weight: Tensor) -> Tensor:
        if self.device.type != "cpu" or self.dtype != torch.float32:
            return functional.rms_norm(values, weight.shape, weight, self.config.rms_norm_eps)
        # torch has no kernel for this on a CPU: it takes fourteen operators, 50 us.
        rows = values.reshape(-1, len(weight))
        result = torch.empty_like(rows)
        cpu.rms_norm(rows.numpy(), weight.numpy(), self.config.rms_norm_eps, result.numpy())
        return result.view_as(values)

    def _input_tables(self, embedding: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What each token's embedding adds to the first product, a row per token.

        Also returns the matrix that rows have yet to be multiplied with (None: done beforehand), and EAGLE-1's for features.
        """
        hidden = self.config.hidden_size
        if not self.takes_features or self.config.block is not None:
            return self._on_device(embedding), None, None
        if self.is_eagle3:
            norm = self._source.get("layers.0.input_layernorm.weight")
            weight, bias = self._fused("layers.0.self_attn", ("q_proj", "k_proj", "v_proj"))
            on_embedding, feature_fc = weight[:, :hidden], None
        else:
            norm, bias = None, self._source.get("fc.bias")
            on_embedding, on_feature = self._source["fc.weight"].tensor_split(2, dim=1)
            feature_fc = self._on_device(on_feature.t())
        fits = embedding.shape[0] * on_embedding.shape[0] * self.dtype.itemsize <= TABLE_BYTES and bias is None
        pieces = []
        for first in range(0, len(embedding), TABLE_CHUNK):
            rows = embedding[first : first + TABLE_CHUNK].float()
            if norm is not None:
                rows = functional.rms_norm(rows, norm.shape, norm.float(), self.config.rms_norm_eps)
            pieces.append(self._on_device(rows @ on_embedding.float().t() if fits else rows))
        table = torch.cat(pieces)
        if fits:
            return table, None, feature_fc
        if bias is not None:
            # A constant column adds the bias within the product.
            table = functional.pad(table, (0, 1), value=1.0)
            on_embedding = torch.cat((on_embedding, bias.unsqueeze(1)), dim=1)
        return table, self._on_device(on_embedding.t()), feature_fc

    def _layer_weights(self, index: int) -> _Layer:
        name = f"layers.{index}"
        qkv, qkv_bias = self._fused(f"{name}.self_attn", ("q_proj", "k_proj", "v_proj"))
        if index == 0 and self.is_eagle3:
            qkv, qkv_bias = qkv[:, self.config.hidden_size :], None
        gate_up, gate_up_bias = self._fused(f"{name}.mlp", ("gate_proj", "up_proj"))
        post_norm = self._vector(f"{name}.post_attention_layernorm.weight")
        assert post_norm is not None
        q_norm, k_norm = (self._source.get(f"{name}.self_attn.{n}_norm.weight") for n in "qk")
        return _Layer(
            input_norm=None if index == 0 and self.is_eagle3 else self._vector(f"{name}.input_layernorm.weight"),
            qkv=self._on_device(qkv.t()),
            qkv_bias=None if qkv_bias is None else self._on_device(qkv_bias),
            out=self._on_device(self._source[f"{name}.self_attn.o_proj.weight"].t()),
            out_bias=self._vector(f"{name}.self_attn.o_proj.bias"),
            q_norm=None if q_norm is None else self._on_device(q_norm[self._paired_order]),
            k_norm=None if k_norm is None else self._on_device(k_norm[self._paired_order]),
            post_norm=post_norm,
            gate_up=self._on_device(gate_up.t()),
            gate_up_bias=None if gate_up_bias is None else self._on_device(gate_up_bias),
            down=self._on_device(self._source[f"{name}.mlp.down_proj.weight"].t()),
            down_bias=self._vector(f"{name}.mlp.down_proj.bias"),
        )

    def _fused(self, prefix: str, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        """Stacks projections into one matrix `[out, in]` and its bias; queries and keys in the paired order."""
        weights = [self._paired(name, self._source[f"{prefix}.{name}.weight"]) for name in names]
        biases = [self._source.get(f"{prefix}.{name}.bias") for name in names]
        present = [self._paired(name, bias) for name, bias in zip(names, biases, strict=True) if bias is not None]
        return torch.cat(weights), torch.cat(present) if len(present) == len(names) else None

    def _paired(self, name: str, tensor: Tensor) -> Tensor:
        if name not in ("q_proj", "k_proj"):
            return tensor
        heads = tensor.view(-1, self.head_dim, *tensor.shape[1:])
        return heads.index_select(1, self._paired_order).reshape(tensor.shape)

    def _vector(self, name: str) -> Tensor | None:
        tensor = self._source.get(name)
        return None if tensor is None else self._on_device(tensor)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()


def affine(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return values @ weight if bias is None else torch.addmm(bias, values, weight)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
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


def _rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """The rotation at each position, `[positions, 1, head_dim / 2]`."""
    angles = torch.outer(positions.double(), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).unsqueeze(1)


def rotate_pairs(vectors: Tensor, rotations: Tensor) -> None:
    """Rotates `[rows, heads, head_dim]` (paired order) in place by `[rows, 1, head_dim / 2]`."""
    pairs = vectors.view(*vectors.shape[:-1], -1, 2)
    if vectors.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(rotations)
    else:
        turned = torch.view_as_complex(pairs.float()) * rotations
        pairs.copy_(torch.view_as_real(turned))
