"""Tiny random heads in all layouts, and reference drafts of them: dense attention, one sequence, float64.  Tests only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.drafter.decoding import GRAPH_STEPS, SIZES, DecodeBatch
from backend.drafter.dflash import DFlashProposer
from backend.drafter.draws import CAPTURED
from backend.drafter.eagle import EagleProposer
from backend.models.check import find_misfits
from backend.models.checkpoint import load_drafter
from tests.support.true_noise import true_gumbel

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class TinyHead:
    """The sizes and switches of a head, with weights drawn from `seed`."""

    kind: str = "eagle3"
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 48
    vocab: int = 61
    draft_vocab: int = 61
    layers: int = 1
    target_layers: int = 8
    max_position: int = 512
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    bias: bool = False
    model_type: str = "llama"
    rope: dict[str, Any] = field(default_factory=dict, hash=False)
    dflash: dict[str, Any] = field(default_factory=dict, hash=False)
    """Further keys of a DFlash or DSpark head's configuration."""
    rank: int = 6
    """Of a DSpark head's Markov head."""
    seed: int = 0

    def weights(self) -> Tensors:
        """Weights by canonical name, in float32; logits are spread widely, so that rounding seldom changes a choice."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * scale

        h, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors: Tensors = {"target.embed": draw(self.vocab, h), "target.lm_head": draw(self.vocab, h)}
        if self.kind == "eagle":
            tensors["fc.weight"] = draw(h, 2 * h, scale=h**-0.5)
        else:
            tensors["fc.weight"] = draw(h, 3 * h, scale=h**-0.5)
            of_features = "layers.0.hidden_norm" if self.kind == "eagle3" else "hidden_norm"
            for name in ("norm", of_features, "layers.0.input_layernorm"):
                tensors[f"{name}.weight"] = 1 + draw(h, scale=0.2)
            is_reduced = self.draft_vocab != self.vocab
            if is_reduced or self.kind == "eagle3":
                tensors["lm_head.weight"] = draw(self.draft_vocab, h)
                picked = torch.randperm(self.vocab, generator=generator)[: self.draft_vocab].sort().values
                tensors |= {"d2t": picked - torch.arange(self.draft_vocab)} if is_reduced else {}
            if self.kind == "dspark":
                tensors["markov_head.markov_w1.weight"] = draw(self.vocab, self.rank)
                tensors["markov_head.markov_w2.weight"] = draw(self.draft_vocab, self.rank, scale=2.0)
        if self.norm_before_fc:
            tensors["input_norm.weight"] = 1 + draw(3 * h, scale=0.2)
        if self.fc_norm:
            tensors |= {f"fc_norm.{i}.weight": 1 + draw(h, scale=0.2) for i in range(3)}
        for i in range(self.layers):
            width = 2 * h if self.kind == "eagle3" and i == 0 else h
            projections = {
                "self_attn.q_proj": (queries, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (h, queries),
                "mlp.gate_proj": (self.inner, h),
                "mlp.up_proj": (self.inner, h),
                "mlp.down_proj": (h, self.inner),
            }
            for name, shape in projections.items():
                tensors[f"layers.{i}.{name}.weight"] = draw(*shape, scale=2 * shape[1] ** -0.5)
                if self.bias:
                    tensors[f"layers.{i}.{name}.bias"] = draw(shape[0], scale=0.3)
            tensors[f"layers.{i}.post_attention_layernorm.weight"] = 1 + draw(h, scale=0.2)
            if i:
                tensors[f"layers.{i}.input_layernorm.weight"] = 1 + draw(h, scale=0.2)
            if self.model_type == "qwen3" or self.kind in ("dflash", "dspark"):
                tensors[f"layers.{i}.self_attn.q_norm.weight"] = 1 + draw(self.head_dim, scale=0.2)
                tensors[f"layers.{i}.self_attn.k_norm.weight"] = 1 + draw(self.head_dim, scale=0.2)
        return tensors

    def layer_config(self) -> dict[str, Any]:
        """The Llama part of the configuration."""
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": self.rope or None,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
        }


def write_target(directory: Path, head: TinyHead, tied: bool = False) -> str:
    """Writes a target's directory: configuration, embedding and, unless tied, output matrix; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = head.weights()
    config = head.layer_config() | {"num_hidden_layers": head.target_layers, "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": weights["target.embed"]}
    if not tied:
        tensors["lm_head.weight"] = weights["target.lm_head"]
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def write_head(directory: Path, head: TinyHead, layout: str = "eagle", suffix: str = "safetensors") -> str:
    """Writes a head's directory in the given layout and file format; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: t for name, t in head.weights().items() if not name.startswith("target.")}
    extras: dict[str, Any] = {
        "norm_before_residual": head.norm_before_residual,
        "norm_output": head.norm_output,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
    }
    if head.kind in ("dflash", "dspark"):
        config = head.layer_config() | {"model_type": "qwen3", "draft_vocab_size": head.draft_vocab, "torch_dtype": "float32"}
        own: dict[str, Any] = {"mask_token_id": 3, "target_layer_ids": [1, 2, 3]}
        if head.kind == "dflash":
            config |= {"architectures": ["DFlashDraftModel"], "block_size": 9, "dflash_config": own}
        else:
            config |= {"architectures": ["Qwen3DSparkModel"], "block_size": 8, "markov_rank": head.rank} | own
        config |= head.dflash
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return str(directory)
    if head.kind == "eagle3":
        extras["draft_vocab_size"] = head.draft_vocab
    if layout == "speculators":
        config = {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": head.layer_config(),
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            **extras,
        }
    else:
        names = ["LlamaForCausalLMEagle3"] if head.kind == "eagle3" else ["LlamaForCausalLM"]
        config = head.layer_config() | extras | {"architectures": names}
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        if "d2t" in tensors:
            tensors["t2d"] = torch.zeros(head.vocab, dtype=torch.bool)
    (directory / "config.json").write_text(json.dumps(config))
    if suffix == "bin":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file(tensors, directory / "model.safetensors")
    return str(directory)


def write_unigram_head(directory: Path, chances: Tensor, kind: str) -> str:
    """A head for the demo's target that drafts every token from one distribution, `[2048]`; its layers add nothing.

    A DSpark head's Markov head, with random weights, makes the distribution depend on the token before.
    """
    head = TinyHead(kind, 256, 4, 2, 64, 32, 2048, 2048, dflash={"max_position_embeddings": 4096})
    write_head(directory, head)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {
        name: torch.zeros_like(t) for name, t in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    tensors |= {name: t / 5 for name, t in tensors.items() if name.startswith("markov_head")}
    only = torch.zeros(2048, 256)
    only[:, 0] = 1.0
    # The norm makes the embedding as long as the square root of its size.
    tensors |= {
        "norm.weight": torch.ones(256),
        "embed_tokens.weight": only,
        "lm_head.weight": only * chances.log().unsqueeze(1) / 16,
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def make_proposer(
    directory: Path,
    head: TinyHead,
    cache_tokens: int = 4096,
    layout: str = "eagle",
    suffix: str = "safetensors",
    dtype: torch.dtype = torch.float32,
    as_on_gpu: bool = False,
) -> EagleProposer:
    """A proposer over a head written to `directory`.

    As on a GPU, `dtype` can be set, and decoding can use tensors that stay where they are, with padding, and read no result
    before the end.
    """
    target = write_target(directory / "target", head)
    weights = load_drafter(write_head(directory / "head", head, layout, suffix), target)
    with mock.patch("backend.drafter.eagle.compute_dtype", return_value=dtype):
        proposer = EagleProposer(weights, cache_tokens)
    if as_on_gpu:
        proposer._head.is_asynchronous = True
        with torch.inference_mode():
            proposer._decoder._captured = {
                (size, rules): DecodeBatch(proposer._head, size, GRAPH_STEPS, rules) for size in SIZES for rules in CAPTURED
            }
    return proposer


def make_one_pass(directory: Path, head: TinyHead, cache_tokens: int = 16384) -> DFlashProposer:
    """A proposer over a DFlash or DSpark head written to `directory`."""
    target = write_target(directory / "target", head)
    return DFlashProposer(load_drafter(write_head(directory / "head", head), target), cache_tokens)


def rows_held(proposer: EagleProposer, key: object) -> int:
    """Rows in the cache of an open request."""
    sequence = proposer._cache.peek(key)
    assert sequence is not None
    return sequence.length


def check(head_dir: str, target_dir: str) -> list[str]:
    """All misfits, errors first; warnings start with `warning: `.  Empty: the head fits."""
    found = find_misfits(head_dir, target_dir)
    return found.errors + [f"warning: {line}" for line in found.warnings]


class Reference:
    """The documented equations of EAGLE and EAGLE-3 heads, with the shared noise by definition, dense and in float64."""

    def __init__(self, head: TinyHead, seed: int = 0, temperature: float = 0.0) -> None:
        self.head, self.seed, self.temperature = head, seed, temperature
        self.w = {name: tensor.double() for name, tensor in head.weights().items()}
        self.margin = float("inf")
        """Smallest gap between best and second score of the last draft."""
        self.values: list[dict[int, float]] = []
        """By draft position: log-probability, plus noise at a temperature, of every token of the draft vocabulary."""

    def draft(self, tokens: list[int], features: dict[int, Tensor], k: int, assumed: Sequence[int] = ()) -> list[int]:
        """`k` draft tokens after `tokens` and those `assumed`.

        Features of `tokens` are given, by position; after them, features are the head's own outputs.
        """
        self.margin = float("inf")
        self.values = []
        kind = self.head.kind
        rows = [(p, tokens[p + 1], features[p].double()) for p in sorted(features) if p + 1 < len(tokens)]
        drafts: list[int] = []
        for step in range(len(assumed) + k):
            output = self._forward(rows)
            normed = output if kind == "eagle" else self._norm(output, "norm")
            logits = self.w["lm_head.weight" if kind == "eagle3" else "target.lm_head"] @ normed
            offsets = self.w.get("d2t", torch.zeros(len(logits)))
            ids = [own + int(offsets[own]) for own in range(len(logits))]
            values = (logits / (self.temperature or 1.0)).log_softmax(-1)
            if self.temperature:
                at = len(tokens) + step
                values = values + torch.tensor([true_gumbel(self.seed, at, token) for token in ids])
            self.values.append(dict(zip(ids, values.tolist(), strict=True)))
            if step < len(assumed):
                token = assumed[step]
            else:
                best = values.topk(2).values
                self.margin = min(self.margin, float(best[0] - best[1]))
                token = ids[int(values.argmax())]
                drafts.append(token)
            rows.append((rows[-1][0] + 1, token, normed if self.head.norm_output else output))
        return drafts

    def _forward(self, rows: list[tuple[int, int, Tensor]]) -> Tensor:
        positions = torch.tensor([p for p, _, _ in rows], dtype=torch.float64)
        embeds = torch.stack([self.w["target.embed"][t] for _, t, _ in rows])
        hidden = torch.stack([feature for _, _, feature in rows])
        if self.head.kind != "eagle3":
            hidden = torch.cat((embeds, hidden), dim=1) @ self.w["fc.weight"].T
        for i in range(self.head.layers):
            name = f"layers.{i}"
            if self.head.kind == "eagle3" and i == 0:
                normed = self._norm(hidden, f"{name}.hidden_norm")
                residual = normed if self.head.norm_before_residual else hidden
                inputs = torch.cat((self._norm(embeds, f"{name}.input_layernorm"), normed), dim=1)
            else:
                residual = hidden
                inputs = self._norm(hidden, f"{name}.input_layernorm") if i else hidden
            future = torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1)
            hidden = self._finish(name, residual + self._attention(name, inputs, inputs, positions, future))
        return hidden[-1]

    def _attention(self, name: str, inputs: Tensor, rows: Tensor, positions: Tensor, unseen: Tensor) -> Tensor:
        """Attention of `inputs`, the last of `rows`, to `rows` at `positions`, but for those `unseen` `[inputs, rows]`."""
        head, dim, new = self.head, self.head.head_dim, len(inputs)
        q = self._linear(f"{name}.self_attn.q_proj", inputs).view(new, -1, dim)
        k = self._linear(f"{name}.self_attn.k_proj", rows).view(len(rows), -1, dim)
        v = self._linear(f"{name}.self_attn.v_proj", rows).view(len(rows), -1, dim)
        if f"{name}.self_attn.q_norm.weight" in self.w:
            q, k = self._norm(q, f"{name}.self_attn.q_norm"), self._norm(k, f"{name}.self_attn.k_norm")
        q, k = self._rotate(q, positions[-new:]), self._rotate(k, positions)
        mixed = torch.zeros_like(q)
        for h in range(head.heads):
            group = h // (head.heads // head.kv_heads)
            scores = (q[:, h] @ k[:, group].T / dim**0.5).masked_fill(unseen, float("-inf"))
            mixed[:, h] = scores.softmax(-1) @ v[:, group]
        return self._linear(f"{name}.self_attn.o_proj", mixed.flatten(1))

    def _finish(self, name: str, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(f"{name}.mlp.gate_proj", normed))
        return hidden + self._linear(f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", normed))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        dim = self.head.head_dim
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if self.head.rope:
            assert self.head.rope["rope_type"] == "linear"
            frequency = frequency / self.head.rope["factor"]
        return rotated(x, positions, frequency)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.w[f"{name}.weight"].T
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out


def rotated(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """Rotary positions of `x` `[rows, heads, dim]`."""
    half = x.shape[-1] // 2
    angle = torch.outer(positions, frequency).repeat(1, 2)[:, None]
    return x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angle.sin()
