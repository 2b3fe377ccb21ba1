"""Makes the demo's drafter, an EAGLE-3 head, teaches it, writes it, and measures its acceptance length.

Each step of the training unrolls the drafter as decoding would (`Drafter.unroll`), so that later draft positions learn from the
drafter's own outputs.

Acceptance length is tokens per target step in greedy speculative decoding, over all prompts together: 1 + accepted draft
tokens / drafts.  Drafts have `DRAFT_LENGTH` tokens; the last draft of a prompt counts in full.  A draft token is
accepted if it and all before it equal the target's greedy text, so that text alone judges drafts from all places at once.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from backend.lab.demo.llama import config_of, default_feature_layers, features, generate
from backend.lab.demo.options import DrafterOptions
from backend.lab.demo.training import Lesson, Stream, windows
from backend.learning.head import Drafter
from backend.learning.lesson import draft_losses
from backend.models.writing import DRAFT_LENGTH, speculators_config, write_checkpoint

VERIFIER_NAME = "outrider-demo-target"
STEP_WEIGHT = 0.9
EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones
PROMPTS = 64
NEW_TOKENS = 128
PROMPT_SEED = 7
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 200
ACCEPTANCE_PLAN = f"{PROMPTS} validation prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {NEW_TOKENS} new tokens each"


def new_head(target: LlamaForCausalLM, settings: DrafterOptions) -> Drafter:
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


@torch.no_grad()
def accepted(target: LlamaForCausalLM, drafter: Drafter, prompt: Tensor, new_tokens: int) -> list[int]:
    """Accepted tokens of each draft, while a prompt `[n]` is decoded greedily until at least `new_tokens` are emitted."""
    text = generate(target, prompt[None], new_tokens + DRAFT_LENGTH)
    rows = text.shape[1] - DRAFT_LENGTH - 1
    _, inputs = features(target, text[:, :rows], drafter.feature_layers)
    outputs = drafter.unroll(text[:, 1:], inputs, DRAFT_LENGTH)
    # Row p drafts the tokens from position p + 2 on.
    hits = [drafter.logits(output).argmax(-1)[0] == text[0, i + 2 : i + 2 + rows] for i, output in enumerate(outputs)]
    kept: list[int] = torch.stack(hits).cumprod(0).sum(0).tolist()
    found = list[int]()
    length = len(prompt) + 1
    while length < len(prompt) + new_tokens:
        found.append(kept[length - 2])
        length += found[-1] + 1
    return found


def evaluate(target: LlamaForCausalLM, drafter: Drafter, stream: Stream) -> dict[str, Any]:
    """Acceptance over prompts from the validation stream, for the record of the training."""
    prompts = windows(stream, LONGEST_PROMPT, PROMPTS, np.random.default_rng(PROMPT_SEED)).to(target.device)
    lengths = np.random.default_rng(PROMPT_SEED).integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, size=PROMPTS)
    runs = zip(prompts, lengths, strict=True)
    drafts = [each for row, length in runs for each in accepted(target, drafter, row[: int(length)], NEW_TOKENS)]
    return {
        "acceptance_length": round(1 + fmean(drafts), 3),
        "acceptance_rate_by_position": [round(fmean(each > place for each in drafts), 4) for place in range(DRAFT_LENGTH)],
        "acceptance_setting": f"greedy, drafts of {DRAFT_LENGTH}, {ACCEPTANCE_PLAN}",
    }
