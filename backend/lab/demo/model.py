"""The small Llama that the demo trains, built from the layers in `backend/learning/layers.py`.

Parameters have the names of transformers' `LlamaForCausalLM`, so a state dict can be saved as a checkpoint.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.learning.layers import MLP, Attention, LayerCache, RMSNorm, Rotary, Shape, initialise


class Block(nn.Module):
    """One decoder layer of the target."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], cache: LayerCache | None = None) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Trunk(nn.Module):
    """Embeddings, layers and final norm: the part that transformers calls `model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape)

    @property
    def last_block(self) -> Block:
        block = self.layers[-1]
        assert isinstance(block, Block)
        return block


class Target(nn.Module):
    """A Llama language model with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.apply(initialise)
        for block in self.model.layers:
            nn.init.zeros_(block.self_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(block.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]

    def caches(self, batch: int, capacity: int) -> list[LayerCache]:
        like = self.model.embed_tokens.weight.detach()
        return [LayerCache.empty(self.shape, batch, capacity, like) for _ in self.model.layers]

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores `[..., vocab]` of final hidden states `[..., hidden]`."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def forward(
        self, tokens: Tensor, caches: Sequence[LayerCache] | None = None, feature_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states `[batch, tokens, hidden]` of `tokens` `[batch, tokens]`, and the features or None.

        Features are the inputs of the n layers in `feature_layers`, side by side: `[batch, tokens, n * hidden]`.
        """
        start = caches[0].length if caches else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        rotation = self.model.rotary(positions)
        hidden: Tensor = self.model.embed_tokens(tokens)
        inputs: dict[int, Tensor] = {}
        for index, block in enumerate(self.model.layers):
            if index in feature_layers:
                inputs[index] = hidden
            hidden = block(hidden, rotation, caches[index] if caches else None)
        features = torch.cat([inputs[index] for index in feature_layers], dim=-1) if feature_layers else None
        return self.model.norm(hidden), features
