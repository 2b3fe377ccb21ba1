"""Makes the demo's drafter, an EAGLE-3 head, teaches it, and writes it.

Each step of the training unrolls the drafter as decoding would (`Drafter.unroll`), so that later draft positions learn from the
drafter's own outputs.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from backend.lab.demo.llama import config_of, default_feature_layers, features
from backend.lab.demo.options import DrafterOptions
from backend.lab.demo.training import Lesson
from backend.learning.head import Drafter
from backend.learning.lesson import draft_losses
from backend.models.initial_head import ATTENTION_INPUTS, repeated_layer
from backend.models.writing import speculators_config, write_checkpoint

VERIFIER_NAME = "outrider-demo-target"
STEP_WEIGHT = 0.9
EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones


def new_head(target: LlamaForCausalLM, settings: DrafterOptions) -> Drafter:
    """A new drafter that starts from its target's last layer, output matrix and norm.

    `fc` starts as a copy of the last feature, which is the input of that layer; weights for embeddings start random and small.
    """
    layer = LlamaConfig.from_dict(config_of(target) | {"num_hidden_layers": 1})
    embeddings = target.model.embed_tokens.weight
    drafter = Drafter(layer, default_feature_layers(target.config.num_hidden_layers), embeddings).to(embeddings.device)
    with torch.no_grad():
        tensors = repeated_layer(target.model.layers[-1].state_dict(), target.model.norm.weight)
        for name in ATTENTION_INPUTS:
            own = drafter.get_parameter(name)[:, : layer.hidden_size]
            tensors[name][:, : layer.hidden_size] = own * EMBEDDING_SCALE
        drafter.load_state_dict(tensors | {"lm_head.weight": embeddings})
    return drafter


def save_head(drafter: Drafter, target: LlamaForCausalLM, directory: Path) -> None:
    """Writes a drafter of `target` in the speculators layout."""
    layer = config_of(target) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    config = speculators_config(layer, drafter.feature_layers, VERIFIER_NAME, ["LlamaForCausalLM"])
    write_checkpoint(directory, config, drafter.state_dict())


def unroll_depth(fraction: float, depth: int) -> int:
    """Steps to unroll after `fraction` of the run: it grows, because later steps build on the first."""
    if fraction < 0.2:
        return 1
    return min(depth, 2) if fraction < 0.45 else depth


def unrolled_loss(drafter: Drafter, target: LlamaForCausalLM, tokens: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Weighted loss over the draft positions, and each position's share of first choices that are the target's.

    `tokens` is `[batch, length]`.  The second result is `[depth]`.
    """
    rows = tokens.shape[1] - depth - 1
    with torch.no_grad():
        scores, inputs = features(target, tokens, drafter.feature_layers)
    outputs = drafter.unroll(tokens[:, 1:], inputs[:, :rows], depth)
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for step, output in enumerate(outputs):
        goal = scores[:, step + 1 : step + 1 + rows].float().flatten(0, 1)
        drafted = drafter.logits(output).float().flatten(0, 1)
        losses.append(draft_losses(drafted, goal).mean())
        hits.append((drafted.detach().argmax(-1) == goal.argmax(-1)).float().mean())
    weights = torch.tensor([STEP_WEIGHT**step for step in range(depth)], device=tokens.device)
    return (torch.stack(losses) * weights).sum() / weights.sum(), torch.stack(hits)


def lesson(drafter: Drafter, target: LlamaForCausalLM, settings: DrafterOptions, is_compiled: bool) -> Lesson:
    """What a step of the training teaches."""
    most = settings.unroll
    loss_of = torch.compile(unrolled_loss, dynamic=False) if is_compiled else unrolled_loss

    def teach(tokens: Tensor, fraction: float, chance: np.random.Generator) -> tuple[Tensor, Tensor]:
        depth = unroll_depth(fraction, most)
        loss, hits = loss_of(drafter, target, tokens, depth)
        return loss, functional.pad(hits, (0, most - depth))

    return teach
