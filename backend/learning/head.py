"""An EAGLE-3 head for training, of transformers' layers: its layer, and the unrolled forward pass that trains it.

Row p of the drafter carries the target's features of position p and the token at p + 1, and predicts the
token at p + 2.  Features are the inputs of three target layers, joined and mapped to the hidden size by
`fc`.  A draft's next step puts the drafter's own output, before its final norm, where the target's feature
would be (EAGLE-3, section 3).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb, repeat_kv
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP


class DrafterBlock(nn.Module):
    """A Llama or Qwen3 layer whose attention reads the next token's embedding beside the feature."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.self_attn: nn.Module = (Qwen3Attention if config.model_type == "qwen3" else LlamaAttention)(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = self.self_attn.get_parameter(f"{name}.weight").shape[0]
            setattr(self.self_attn, name, nn.Linear(2 * hidden, size, bias=False))
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp: nn.Module = Qwen3MLP(config)

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

    def __init__(self, config: PreTrainedConfig, feature_layers: tuple[int, ...], embeddings: Tensor) -> None:
        """`config.vocab_size` is the draft vocabulary's; `embeddings` `[vocab, hidden]` are of the target's.

        `feature_layers`: the target's layers whose inputs are the features.
        """
        super().__init__()
        config._attn_implementation = "sdpa"
        self.config, self.feature_layers = config, feature_layers
        self.fc = nn.Linear(len(feature_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DrafterBlock(config)])
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary: nn.Module = LlamaRotaryEmbedding(config)
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
        places = torch.arange(rows + depth, device=tokens.device)[None]
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(depth):
            rotation = self.rotary(self.norm.weight, places[:, step : step + rows])
            joined = self.block.join(embedded[:, step : step + rows], feature)
            feature = self.block.finish(feature, self._attend(joined, rotation, keys, values))
            outputs.append(feature)
        return outputs

    def _attend(self, joined: Tensor, rotation: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attention of one unrolled step; `keys` and `values` collect one entry per step."""
        attention: Any = self.block.self_attn
        heads = (*joined.shape[:2], -1, attention.head_dim)
        query, key, value = (each(joined).view(heads) for each in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        turned = apply_rotary_pos_emb(query, key, *rotation, unsqueeze_dim=2)
        query, key, value = (each.to(value.dtype).transpose(1, 2) for each in (*turned, value))
        keys.append(repeat_kv(key, attention.num_key_value_groups))
        values.append(repeat_kv(value, attention.num_key_value_groups))
        if len(keys) == 1:
            attended = functional.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True)
        else:
            rows, scale = query.shape[2], attention.scaling
            future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
            prefix = (query @ keys[0].transpose(-1, -2) * scale).float().masked_fill(future, float("-inf"))
            own = torch.stack([(query * past).float().sum(-1) * scale for past in keys[1:]], dim=-1)
            weights = torch.cat((prefix, own), dim=-1).softmax(-1).to(value.dtype)
            attended = weights[..., :rows] @ values[0]
            for index, past in enumerate(values[1:]):
                attended = attended + weights[..., rows + index, None] * past
        output: Tensor = attention.o_proj(attended.transpose(1, 2).flatten(2))
        return output


def initialise(module: nn.Module) -> None:
    """Draws normal weights, scaled so that activations stay of order one."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
