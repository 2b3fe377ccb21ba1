"""Makes the demo's drafter, an EAGLE-3 head (`backend/learning/head.py`), from its target, and drafts greedily with it."""

from dataclasses import replace

import torch
from torch import Tensor

from backend.lab.demo.model import Target
from backend.learning.head import Drafter, DrafterShape
from backend.learning.layers import LayerCache

EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    if layers < 4:
        raise ValueError(f"a target of {layers} layers has no three inner layers to take features from")
    return (layers - 3, layers - 2, layers - 1)


def new_drafter(target: Target) -> Drafter:
    """A new drafter that starts from its target's last layer, output matrix and norm.

    `fc` starts as a copy of the last feature, which is the input of that layer; weights for embeddings start random and small.
    """
    shape = DrafterShape(replace(target.shape, num_hidden_layers=1), default_feature_layers(target.shape.num_hidden_layers))
    embeddings = target.model.embed_tokens.weight
    drafter = Drafter(shape, embeddings).to(embeddings.device)
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


def chain(drafter: Drafter, token: Tensor, feature: Tensor, cache: LayerCache, depth: int) -> Tensor:
    """Greedy draft of `depth` tokens: `[batch, depth]`.

    `token` `[batch, n]` and `feature` `[batch, n, hidden]` are the rows not yet in `cache`.  Their entries stay in the cache;
    entries of drafted tokens are dropped again.
    """
    output = drafter.step(token, feature, cache)[:, -1:]
    kept = cache.length
    drafted = [drafter.logits(output).argmax(-1)]
    while len(drafted) < depth:
        output = drafter.step(drafted[-1], output, cache)
        drafted.append(drafter.logits(output).argmax(-1))
    cache.length = kept
    return torch.cat(drafted, dim=1)
