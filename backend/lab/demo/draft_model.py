"""Trains a small draft model for a demo target: it learns the target's distributions on the corpus.

Its embeddings start as the first principal components of the target's embeddings; they are tied, so its output uses them too.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import llama_config, new_llama, save_llama
from backend.lab.demo.options import DraftModelOptions
from backend.lab.demo.training import Lesson
from backend.learning.lesson import draft_losses


def new_head(target: LlamaForCausalLM, settings: DraftModelOptions) -> LlamaForCausalLM:
    """An untrained draft model whose embeddings are the first principal components of the target's."""
    sizes = target.config
    model = new_llama(llama_config(sizes.vocab_size, settings.hidden, settings.layers, 32, sizes.max_position_embeddings))
    embedding = target.model.embed_tokens.weight.detach().float()
    left, scales, _ = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    components = (left * scales)[:, : settings.hidden]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(components * (embedding.std() / components.std()))
    return model


def distillation_loss(model: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over all positions, and the share of them with the target's first choice, `[1]`."""
    with torch.no_grad():
        goal = target(tokens, use_cache=False).logits.float().flatten(0, 1)
    drafted = model(tokens, use_cache=False).logits.float().flatten(0, 1)
    return draft_losses(drafted, goal).mean(), (drafted.detach().argmax(-1) == goal.argmax(-1)).float().mean()[None]


def lesson(model: LlamaForCausalLM, target: LlamaForCausalLM, settings: DraftModelOptions, is_compiled: bool) -> Lesson:
    """What a step of the training teaches."""
    loss_of = torch.compile(distillation_loss, dynamic=False) if is_compiled else distillation_loss
    return lambda tokens, *_: loss_of(model, target, tokens)


def save_head(model: LlamaForCausalLM, target: LlamaForCausalLM, directory: Path) -> None:
    """Writes a draft model in bfloat16."""
    save_llama(model.to(torch.bfloat16), directory)
