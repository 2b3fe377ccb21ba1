"""The EAGLE-3 drafter of the demo target: its layers, one decoding step, and the unrolled forward that trains it.

Row p of the drafter carries the target's features of position p and the token at p + 1, and predicts the
token at p + 2.  Features are the inputs of three target layers, joined and mapped to the hidden size by
`fc`.  A draft's next step puts the drafter's own output, before its final norm, where the target's feature
would be (EAGLE-3, section 3).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from backend.lab.demo.model import MLP, Attention, LayerCache, RMSNorm, Rotary, Shape, Target, initialise

EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """The sizes of a drafter's only layer, and the target layers whose inputs are its features."""

    layer: Shape
    feature_layers: tuple[int, ...]


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features say most about the next token."""
    if layers < 4:
        raise ValueError(f"a target of {layers} layers has no three inner layers to take features from")
    return (layers - 3, layers - 2, layers - 1)


class DrafterBlock(nn.Module):
    """A Llama layer whose attention reads the next token's embedding beside the feature."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def join(self, embeddings: Tensor, feature: Tensor) -> Tensor:
        """What attention reads: `[..., 2 * hidden]`."""
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(feature)), dim=-1)

    def finish(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, before the final norm; the feature is the residual."""
        hidden = feature + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Drafter(nn.Module):
    """An EAGLE-3 head over the target's whole vocabulary; embeddings are the target's, frozen and not stored."""

    embeddings: Tensor
    layers: nn.ModuleList

    def __init__(self, shape: DrafterShape, embeddings: Tensor) -> None:
        super().__init__()
        sizes = shape.layer
        self.shape = shape
        self.fc = nn.Linear(len(shape.feature_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList([DrafterBlock(sizes)])
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.rotary = Rotary(sizes)
        self.register_buffer("embeddings", embeddings.detach().clone(), persistent=False)
        self.apply(initialise)

    @classmethod
    def for_target(cls, target: Target) -> "Drafter":
        """A new drafter that starts from its target's last layer, output matrix and norm.

        `fc` passes on the latest feature, which is what that layer reads; embeddings enter with random weights.
        """
        shape = DrafterShape(replace(target.shape, num_hidden_layers=1), default_feature_layers(target.shape.num_hidden_layers))
        embeddings = target.model.embed_tokens.weight
        drafter = cls(shape, embeddings).to(embeddings.device)
        last, block, hidden = target.model.last_block, drafter.block, target.shape.hidden_size
        with torch.no_grad():
            drafter.lm_head.weight.copy_(embeddings)
            drafter.norm.weight.copy_(target.model.norm.weight)
            drafter.fc.weight.zero_()
            drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
            block.hidden_norm.weight.copy_(last.input_layernorm.weight)
            block.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
            for name in ("q_proj", "k_proj", "v_proj"):
                weight = block.self_attn.get_parameter(f"{name}.weight")
                weight[:, :hidden].mul_(EMBEDDING_SCALE)
                weight[:, hidden:].copy_(last.self_attn.get_parameter(f"{name}.weight"))
            block.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
            block.mlp.load_state_dict(last.mlp.state_dict())
        return drafter

    @property
    def block(self) -> DrafterBlock:
        """The only layer."""
        block = self.layers[0]
        assert isinstance(block, DrafterBlock)
        return block

    def cache(self, batch: int, capacity: int) -> LayerCache:
        """An empty cache."""
        return LayerCache.empty(self.shape.layer, batch, capacity, self.fc.weight.detach())

    def logits(self, output: Tensor) -> Tensor:
        """Scores `[..., vocab]` of layer outputs `[..., hidden]`."""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores

    def step(self, tokens: Tensor, feature: Tensor, cache: LayerCache) -> Tensor:
        """Run rows that follow what `cache` holds: `tokens` `[batch, n]`, `feature` and result `[batch, n, hidden]`."""
        block = self.block
        start = cache.length
        rotation = self.rotary(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        joined = block.join(functional.embedding(tokens, self.embeddings), feature)
        return block.finish(feature, block.self_attn(joined, rotation, cache))

    def unroll(self, tokens: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """Outputs of `depth` chained steps from every row at once, each `[batch, rows, hidden]`.

        `tokens` is `[batch, rows + depth]`, the first of them the token at position 1; `features` is
        `[batch, rows, n * hidden]`, the target's, from position 0.  Output j of row p has read the tokens
        up to position p + 1 + j and predicts the one after.  In step j a row attends to the rows up to its
        own that carry the target's features, and to its own earlier steps: what a draft of depth j sees
        when it is decoded.
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


def chain(drafter: Drafter, token: Tensor, feature: Tensor, cache: LayerCache, depth: int) -> Tensor:
    """Greedy draft of `depth` tokens `[batch, depth]`; the cache is left as it was found.

    `token` `[batch, n]` and `feature` `[batch, n, hidden]` are the rows not yet in `cache`; their entries
    stay in it.
    """
    output = drafter.step(token, feature, cache)[:, -1:]
    kept = cache.length
    drafted = [drafter.logits(output).argmax(-1)]
    while len(drafted) < depth:
        output = drafter.step(drafted[-1], output, cache)
        drafted.append(drafter.logits(output).argmax(-1))
    cache.length = kept
    return torch.cat(drafted, dim=1)
