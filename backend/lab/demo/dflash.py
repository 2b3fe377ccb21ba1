"""Makes a head that drafts in one pass for a demo target, teaches it, and writes it in DFlash's layout.

The head's layers read the target's features as keys and values.  A block is the latest token and mask tokens behind it; each
mask predicts the token in its place.  Training puts blocks of random lengths at random places of each text, all at once.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from backend.lab.demo.llama import config_of, default_feature_layers, features
from backend.lab.demo.options import DrafterOptions
from backend.lab.demo.tokenizer import PAD_ID
from backend.lab.demo.training import Lesson
from backend.learning.head import initialise
from backend.learning.lesson import draft_losses
from backend.models.writing import write_checkpoint

LAYERS = 3
MASKS = 8
"""Mask tokens of the longest block."""
STEP_WEIGHT = 0.85
TOKENS_PER_BLOCK = 10
"""A text of n tokens gets n / 10 blocks in each step of the training."""


class BlockDrafter(nn.Module):
    """The head, of Qwen3's layers; embeddings and output matrix are the target's, frozen and not stored."""

    embeddings: Tensor

    def __init__(self, config: PreTrainedConfig, feature_layers: tuple[int, ...], embeddings: Tensor) -> None:
        super().__init__()
        config._attn_implementation = "sdpa"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.feature_layers = feature_layers
        self.fc = nn.Linear(len(feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(hidden, eps)
        self.rotary: nn.Module = Qwen3RotaryEmbedding(config)
        self.register_buffer("embeddings", embeddings.detach().clone(), persistent=False)
        self.apply(initialise)

    def forward(self, tokens: Tensor, inputs: Tensor, anchors: Tensor, lengths: Tensor) -> Tensor:
        """Scores `[batch, blocks, MASKS, vocab]` of the tokens behind `anchors`.

        `tokens` is `[batch, n]`, `inputs` the target's features of them; `anchors` and `lengths`, `[batch, blocks]`: the
        place of each block's first token, and its masks.  Masks beyond that are not seen by the others.
        """
        batch, blocks = anchors.shape
        context = self.hidden_norm(self.fc(inputs))
        offsets = torch.arange(1 + MASKS, device=tokens.device)
        ids = torch.full((batch, blocks, 1 + MASKS), PAD_ID, device=tokens.device)
        ids[:, :, 0] = tokens.gather(1, anchors)
        hidden = functional.embedding(ids.flatten(1), self.embeddings)
        places = (anchors.unsqueeze(-1) + offsets).flatten(1)
        seen = torch.arange(tokens.shape[1], device=tokens.device) < anchors.repeat_interleave(1 + MASKS, 1).unsqueeze(-1)
        own = torch.eye(blocks, dtype=torch.bool, device=tokens.device).repeat_interleave(1 + MASKS, 0)
        inside = (offsets <= lengths.unsqueeze(-1)).unsqueeze(1) & own.unsqueeze(-1)
        visible = torch.cat((seen, inside.flatten(2)), dim=-1).unsqueeze(1)
        rotation, cache = self.rotary(hidden, places), DynamicCache()
        before = self.rotary(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            heads = (*context.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(heads)).transpose(1, 2)
            values = attention.v_proj(context).view(heads).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *before)[1], values, index)
            hidden = layer(hidden, visible, position_embeddings=rotation, past_key_values=cache)
        masks = hidden.view(batch, blocks, 1 + MASKS, -1)[:, :, 1:]
        return functional.linear(self.norm(masks), self.embeddings)


def new_head(target: LlamaForCausalLM, settings: DrafterOptions) -> BlockDrafter:
    """A new head whose layers begin as its target's last ones; `fc` begins as a copy of the last feature."""
    config = Qwen3Config.from_dict(config_of(target) | {"model_type": "qwen3", "num_hidden_layers": LAYERS})
    layers = default_feature_layers(target.config.num_hidden_layers)
    head = BlockDrafter(config, layers, target.model.embed_tokens.weight).to(target.device)
    with torch.no_grad():
        for own, theirs in zip(head.layers, target.model.layers[-LAYERS:], strict=True):
            own.load_state_dict(theirs.state_dict(), strict=False)
        head.norm.weight.copy_(target.model.norm.weight)
        head.fc.weight.zero_()
        head.fc.weight[:, -config.hidden_size :].copy_(torch.eye(config.hidden_size))
    return head


def save_head(head: BlockDrafter, target: LlamaForCausalLM, directory: Path) -> None:
    """Writes a head of `target` in bfloat16.  Its `target_layer_ids` are outputs of layers: one less than the inputs."""
    config = config_of(target) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "block_size": 1 + MASKS,
        "dflash_config": {"mask_token_id": PAD_ID, "target_layer_ids": [layer - 1 for layer in head.feature_layers]},
        "torch_dtype": "bfloat16",
    }
    write_checkpoint(directory, config, {name: each.to(torch.bfloat16) for name, each in head.state_dict().items()})


def block_loss(
    head: BlockDrafter, target: LlamaForCausalLM, tokens: Tensor, anchors: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted loss over the masks, and by place the share of first choices that are the target's, `[MASKS]`."""
    with torch.no_grad():
        scores, inputs = features(target, tokens, head.feature_layers)
    offsets = torch.arange(MASKS, device=tokens.device)
    counted = (offsets < lengths.unsqueeze(-1)).view(-1, MASKS)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    goal = scores[rows, anchors.unsqueeze(-1) + offsets].float().flatten(0, 2)
    drafted = head(tokens, inputs, anchors, lengths).float().flatten(0, 2)
    weights = STEP_WEIGHT**offsets * counted
    hits = (drafted.detach().argmax(-1) == goal.argmax(-1)).view(-1, MASKS) & counted
    losses = draft_losses(drafted, goal).view(-1, MASKS)
    return (losses * weights).sum() / weights.sum(), hits.sum(0) / counted.sum(0).clamp(min=1)


def lesson(head: BlockDrafter, target: LlamaForCausalLM, settings: DrafterOptions, is_compiled: bool) -> Lesson:
    """What a step of the training teaches.  Half of the blocks are whole: drafts may also be shorter."""

    def teach(tokens: Tensor, fraction: float, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        size = len(tokens), max(1, tokens.shape[1] // TOKENS_PER_BLOCK)
        anchors = chance.integers(1, tokens.shape[1] - MASKS, size=size)
        shorter = chance.integers(1, MASKS + 1, size=size)
        lengths = np.where(chance.random(size) < 0.5, MASKS, shorter)
        return block_loss(head, target, tokens, *(torch.from_numpy(each).to(tokens.device) for each in (anchors, lengths)))

    return teach
