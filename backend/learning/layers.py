"""The layers of a Llama for training EAGLE heads (`head.py`): rotary positions, attention, and the gated network.

Parameter names are those of transformers, so a state dict can be saved as a checkpoint.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.models.head_config import Rope
from backend.models.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """Sizes of a Llama model; the names follow its `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 704
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    rope: Rope | None = None
    """Rotary parameters with scaling; None: `rope_theta` without scaling."""
    qk_norm: bool = False


class Rotary(nn.Module):
    """Tables of rotary position embeddings, `[max_positions, head_dim]` each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LlamaSizes) -> None:
        super().__init__()
        rope = shape.rope or Rope(shape.rope_theta, "default", {})
        positions = torch.arange(shape.max_position_embeddings, dtype=torch.float64)
        angles = torch.outer(positions, inverse_frequencies(rope, shape.head_dim)).float()
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` `[tokens]`."""
        return self.cos[positions], self.sin[positions]


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings to `[batch, heads, tokens, head_dim]`."""
    cos, sin = rotation
    low, high = states.chunk(2, dim=-1)
    return (states * cos + torch.cat((-high, low), dim=-1) * sin).to(states.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose projections read `input_size` features."""

    def __init__(self, shape: LlamaSizes, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def project(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, each `[batch, heads, tokens, head_dim]`."""
        batch, tokens, _ = hidden.shape
        query = self.q_proj(hidden).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return rotate(query, rotation), rotate(key, rotation), value

    def widen(self, states: Tensor) -> Tensor:
        """Repeat key or value heads so that there is one per query head."""
        return states.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def merge(self, attended: Tensor) -> Tensor:
        """`[batch, heads, tokens, head_dim]` back to `[batch, tokens, hidden]`."""
        batch, _, tokens, _ = attended.shape
        merged: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, tokens, -1))
        return merged


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, shape: LlamaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


def initialise(module: nn.Module) -> None:
    """Draws normal weights, scaled so that activations stay of order one."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
