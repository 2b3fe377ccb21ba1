"""Makes the demo's drafter, an EAGLE-3 head, trains it against the target's distributions, and writes it.

It learns from text that the target generated and from source code.  Each step unrolls the drafter as decoding would
(`Drafter.unroll`), so that later draft positions learn from the drafter's own outputs.  The loss is that of heads that learn
while they serve (`backend/learning/lesson.py`), at temperature 1.
"""

import logging
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from backend.lab.demo.llama import config_of, features, generate
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.training import Stream, TrainingProgress, resolve_device, train, windows
from backend.learning.head import Drafter
from backend.learning.lesson import draft_losses
from backend.learning.optimizers import Optimizers
from backend.models.writing import speculators_config, write_checkpoint

LOGGER = logging.getLogger(__name__)
STEP_WEIGHT = 0.9
EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones
BATCH = 128
"""Rows that are generated together, from prompts of one length at one temperature."""


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    if layers < 4:
        raise ValueError(f"a target of {layers} layers has no three inner layers to take features from")
    return (layers - 3, layers - 2, layers - 1)


def new_drafter(target: LlamaForCausalLM) -> Drafter:
    """A new drafter that starts from its target's last layer, output matrix and norm.

    `fc` starts as a copy of the last feature, which is the input of that layer; weights for embeddings start random and small.
    """
    layer = LlamaConfig.from_dict(config_of(target) | {"num_hidden_layers": 1})
    embeddings = target.model.embed_tokens.weight
    drafter = Drafter(layer, default_feature_layers(target.config.num_hidden_layers), embeddings).to(embeddings.device)
    last, block, hidden = target.model.layers[-1], drafter.block, layer.hidden_size
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
        block.self_attn.get_parameter("o_proj.weight").copy_(last.self_attn.o_proj.weight)
        block.mlp.load_state_dict(last.mlp.state_dict())
    return drafter


def save_drafter(drafter: Drafter, target: LlamaForCausalLM, directory: Path, verifier: str) -> None:
    """Write a drafter of `target` in the speculators layout; `verifier` is the target's name."""
    layer = config_of(target) | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    config = speculators_config(layer, drafter.feature_layers, verifier, ["LlamaForCausalLM"])
    write_checkpoint(directory, config, drafter.state_dict())


@torch.no_grad()
def training_rows(target: LlamaForCausalLM, stream: Stream, options: DemoOptions) -> tuple[Tensor, Tensor]:
    """Short and long rows `[count, length]`: what the target wrote at several temperatures, and source code.

    Prompts are 16 to 128 tokens of `stream`.
    """
    settings, found = options.drafter, []
    torch.manual_seed(options.seed)
    chance = np.random.default_rng((options.seed, 1))
    for share, length in ((1.0 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        began, written = time.monotonic(), list[Tensor]()
        for temperature, part in settings.mixture:
            left = max(1, int(settings.generated_tokens * share * part / length))
            while left > 0:
                count, prompt = min(BATCH, left), int(chance.integers(16, min(128, length // 2) + 1))
                start = windows(stream, prompt, count, (options.seed, 2, length, len(written)))[:, :-1].to(target.device)
                written.append(generate(target, start, length - prompt, temperature).cpu())
                left -= count
        rows = torch.cat(written)
        LOGGER.info("drafter data: %d rows of %d in %.0f s", *rows.shape, time.monotonic() - began)
        source = windows(stream, length, max(1, int(len(rows) * settings.source_share)), (options.seed, 3))
        found.append(torch.cat((rows, source[:, :-1])))
    return found[0], found[1]


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


def train_drafter(options: DemoOptions, target: LlamaForCausalLM, stream: Stream) -> tuple[Drafter, TrainingProgress]:
    """Trains a drafter for `target` until the budget is spent."""
    settings, device = options.drafter, resolve_device(options.device)
    target = target.to(device).eval().requires_grad_(False)
    short, long = training_rows(target, stream, options)
    torch.manual_seed(options.seed)
    drafter = new_drafter(target)
    optimizers = Optimizers(drafter.named_parameters(), settings.matrix_rate, settings.embedding_rate, settings.weight_decay)
    loss_of = torch.compile(unrolled_loss, dynamic=False) if options.compile else unrolled_loss
    hits = torch.zeros(settings.unroll)

    def step(progress: TrainingProgress, fraction: float) -> tuple[Tensor, int, str]:
        rows = long if fraction >= 1.0 - settings.long_share else short
        count = max(1, settings.tokens_per_step // rows.shape[1])
        chosen = np.random.default_rng((options.seed, progress.step)).integers(len(rows), size=count)
        tokens = rows[chosen].to(device)
        depth = unroll_depth(fraction, settings.unroll)
        loss, hit = loss_of(drafter, target, tokens, depth)
        hits[:depth] += 0.05 * (hit.cpu() - hits[:depth])
        return loss, tokens.numel(), "first choices " + " ".join(f"{each:.3f}" for each in hits.tolist())

    return drafter, train("drafter", device, settings, optimizers, step)
