"""Trains a small draft model for an existing demo target: it learns the target's distributions on the corpus.

Its embeddings start as the first principal components of the target's embeddings; they are tied, so its output uses them too.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from backend.lab.bench.prompts import docstrings
from backend.lab.demo.checkpoints import load_target, save_target
from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions, DraftModelOptions
from backend.lab.demo.tokenizer import save_tokenizer, token_stream
from backend.lab.demo.train import RECORD
from backend.lab.demo.training import Progress, Windows, goals, resolve_device, train
from backend.learning.layers import Shape
from backend.learning.optimizers import Optimizers
from backend.models.writing import replacing
from backend.rollout.corpus import Document, load_corpus


def draft_shape(target: Shape, settings: DraftModelOptions) -> Shape:
    """The sizes of a draft model for a target of shape `target`."""
    return Shape(
        vocab_size=target.vocab_size,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // 32,
        num_key_value_heads=max(1, settings.hidden // 64),
        head_dim=32,
        intermediate_size=settings.hidden * 11 // 4,
        max_position_embeddings=target.max_position_embeddings,
    )


def begin(shape: Shape, target: Target) -> Target:
    """An untrained draft model whose embeddings are the first principal components of the target's."""
    model = Target(shape)
    embedding = target.model.embed_tokens.weight.detach().float()
    left, scales, _ = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    components = (left * scales)[:, : shape.hidden_size]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(components * (embedding.std() / components.std()))
    return model


def distillation_loss(model: Target, target: Target, tokens: Tensor, first_choice: float) -> tuple[Tensor, Tensor]:
    """Mean cross entropy in nats to the target's distributions, and the share of positions with the target's first choice."""
    with torch.no_grad():
        goal, choice = goals(target.logits(target(tokens)[0]).flatten(0, 1), first_choice)
    drafted = model.logits(model(tokens)[0]).float().flatten(0, 1)
    return functional.cross_entropy(drafted, goal), (drafted.detach().argmax(-1) == choice).float().mean()


def train_draft_model(options: DemoOptions, directory: Path) -> float:
    """Trains until the budget is spent, resuming from `run_dir`, and writes the model to `directory`.

    Returns the recent share of positions at which its first choice was the target's.
    """
    settings, device = options.draft_model, resolve_device(options.device)
    torch.manual_seed(options.seed)
    target = load_target(options.target_dir).to(device).eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(options.target_dir))
    documents = load_corpus().train
    if settings.domain == "prose":
        documents = tuple(Document(str(number), text) for number, text in enumerate(docstrings(documents)))
    windows = Windows(token_stream(tokenizer, documents), settings.length, options.seed)
    model = begin(draft_shape(target.shape, settings), target).to(device)
    optimizers = Optimizers(model.named_parameters(), settings.matrix_rate, settings.embedding_rate, 0.0)
    loss_of = torch.compile(distillation_loss, dynamic=False) if options.compile else distillation_loss
    hits = 0.0

    def step(progress: Progress, fraction: float) -> tuple[Tensor, int, str]:
        nonlocal hits
        tokens = progress.draw(windows, max(1, settings.tokens_per_step // windows.length))[:, :-1].to(device)
        loss, hit = loss_of(model, target, tokens, settings.first_choice)
        hits += (0.05 if progress.step else 1.0) * (float(hit) - hits)
        return loss, tokens.numel(), f"first choices {hits:.3f}"

    progress = train("draft-model", options, settings, model, optimizers, step)
    _package(options, model, tokenizer, progress, hits, directory)
    return hits


def _package(
    options: DemoOptions, model: Target, tokenizer: PreTrainedTokenizerFast, progress: Progress, hits: float, directory: Path
) -> None:
    description = {
        "command": f"python -m backend.lab.demo --draft-model --draft-model-minutes {options.draft_model.minutes:g}"
        f" --draft-model-domain {options.draft_model.domain} --seed {options.seed}",
        "options": asdict(options.draft_model),
        "steps": progress.step,
        "tokens_seen": progress.tokens,
        "minutes": round(progress.elapsed_s / 60, 1),
        "first_choices_of_the_target": round(hits, 4),
    }
    with replacing(directory) as fresh:
        save_target(model.to(torch.bfloat16), fresh)
        save_tokenizer(tokenizer, fresh)
        (fresh / RECORD).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
