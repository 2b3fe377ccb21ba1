"""Trains a small draft model for a demo target: it learns the target's distributions on the corpus.

Its embeddings start as the first principal components of the target's embeddings; they are tied, so its output uses them too.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import llama_config, new_llama, save_llama
from backend.lab.demo.options import DraftModelOptions
from backend.lab.demo.training import Lesson


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


def distillation_loss(
    model: LlamaForCausalLM, target: LlamaForCausalLM, tokens: Tensor, first_choice: float
) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats to the target's distributions, and the share of positions with its first choice, `[1]`.

    The first choice gets a weight of `first_choice`, and the rest is the target's distribution at temperature 1.
    """
    with torch.no_grad():
        scores = target(tokens, use_cache=False).logits.float().flatten(0, 1)
        choice = scores.argmax(-1, keepdim=True)
        goal = scores.softmax(-1) * (1.0 - first_choice)
        goal.scatter_add_(-1, choice, torch.full_like(goal[:, :1], first_choice))
    drafted = model(tokens, use_cache=False).logits.float().flatten(0, 1)
    return functional.cross_entropy(drafted, goal), (drafted.detach().argmax(-1, keepdim=True) == choice).float().mean(0)


def lesson(model: LlamaForCausalLM, target: LlamaForCausalLM, settings: DraftModelOptions, is_compiled: bool) -> Lesson:
    """What a step of the training teaches."""
    loss_of = torch.compile(distillation_loss, dynamic=False) if is_compiled else distillation_loss
    return lambda tokens, *_: loss_of(model, target, tokens, settings.first_choice)


def save_head(model: LlamaForCausalLM, target: LlamaForCausalLM, directory: Path) -> None:
    """Writes a draft model in bfloat16."""
    save_llama(model.to(torch.bfloat16), directory)
