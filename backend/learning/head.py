"""An EAGLE-3 head for training: its layer, and the unrolled forward pass that trains it.

Row p of the drafter carries the target's features of position p and the token at p + 1, and predicts the
token at p + 2.  Features are the inputs of three target layers, joined and mapped to the hidden size by
`fc`.  A draft's next step puts the drafter's own output, before its final norm, where the target's feature
would be (EAGLE-3, section 3).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.learning.layers import MLP, Attention, LlamaSizes, Rotary, initialise


class DrafterBlock(nn.Module):
    """A Llama layer whose attention reads the next token's embedding beside the feature."""

    def __init__(self, shape: LlamaSizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def join(self, embeddings: Tensor, feature: Tensor) -> Tensor:
        """The input of attention: `[..., 2 * hidden]`."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(feature)), dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, before the final norm; the feature is the residual."""
        hidden = feature + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Drafter(nn.Module):
    """An EAGLE-3 head of one layer; embeddings are the target's, frozen and not stored."""

    embeddings: Tensor
    layers: nn.ModuleList

    def __init__(self, sizes: LlamaSizes, feature_layers: tuple[int, ...], embeddings: Tensor) -> None:
        """`sizes.vocab_size` is the draft vocabulary's; `embeddings` `[vocab, hidden]` are of the target's.

        `feature_layers`: the target's layers whose inputs are the features.
        """
        super().__init__()
        self.sizes, self.feature_layers = sizes, feature_layers
        self.fc = nn.Linear(len(feature_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList([DrafterBlock(sizes)])
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.rotary = Rotary(sizes)
        self.register_buffer("embeddings", embeddings.detach().clone(), persistent=False)
        self.apply(initialise)

    @property
    def block(self) -> DrafterBlock:
        """The only layer."""
        block = self.layers[0]
        assert isinstance(block, DrafterBlock)
        return block

    def logits(self, output: Tensor) -> Tensor:
        """Scores `[..., vocab]` of layer outputs `[..., hidden]`."""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Outputs of `depth` chained steps from every row at once, each `[batch, rows, hidden]`.

        `tokens` is `[batch, rows + depth]` and begins with the token at position 1; `features` is
        `[batch, rows, n * hidden]`, the target's, from position 0.  Output j of row p has read the tokens
        up to position p + 1 + j and predicts the next one.  In step j a row attends to the rows with the
        target's features up to its own, and to its own earlier steps.  A draft of depth j attends to the
        same rows when it is decoded.
        """
        rows = features.shape[1]
        feature: Tensor = self.fc(features)
        embedded = functional.embedding(tokens, self.embeddings)
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(depth):
            rotation = self.rotary(torch.arange(step, step + rows, device=tokens.device))
            joined = self.block.join(embedded[:, step : step + rows], feature)
            attended = self._attend(joined, rotation, keys, values)
            feature = self.block.finish(feature, attended)
            outputs.append(feature)
        return outputs

    def _attend(self, joined: Tensor, rotation: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of one unrolled step; `keys` and `values` collect one entry per step."""
        attention = self.block.self_attn
        query, key, value = attention.project(joined, rotation)
        keys.append(attention.widen(key))
        values.append(attention.widen(value))
        if len(keys) == 1:
            attended = functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
            return attention.merge(attended)
        rows, scale = query.shape[2], attention.head_dim**-0.5
        future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        prefix = (query @ keys[0].transpose(-1, -2) * scale).float().masked_fill(future, float("-inf"))
        own = torch.stack([(query * past).float().sum(-1) * scale for past in keys[1:]], dim=-1)
        weights = torch.cat((prefix, own), dim=-1).softmax(-1).to(value.dtype)
        attended = weights[..., :rows] @ values[0]
        for index, past in enumerate(values[1:]):
            attended = attended + weights[..., rows + index, None] * past
        return attention.merge(attended)
