"""Trains a small draft model for an existing demo target: it learns the target's distributions on the corpus.

Its embeddings start as the first principal components of the target's embeddings; they are tied, so its output uses them too.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from backend.lab.bench.prompts import docstrings
from backend.lab.demo.llama import llama_config, load_llama, new_llama, save_llama
from backend.lab.demo.options import DemoOptions, DraftModelOptions
from backend.lab.demo.tokenizer import save_tokenizer, token_stream
from backend.lab.demo.train import RECORD
from backend.lab.demo.training import TrainingProgress, goals, resolve_device, train, windows
from backend.learning.optimizers import Optimizers
from backend.models.writing import replacing, write_json
from backend.rollout.corpus import Document, load_corpus


def begin(target: LlamaForCausalLM, settings: DraftModelOptions) -> LlamaForCausalLM:
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
    """Mean cross entropy in nats to the target's distributions, and the share of positions with the target's first choice."""
    with torch.no_grad():
        goal, choice = goals(target(tokens, use_cache=False).logits.flatten(0, 1), first_choice)
    drafted = model(tokens, use_cache=False).logits.float().flatten(0, 1)
    return functional.cross_entropy(drafted, goal), (drafted.detach().argmax(-1) == choice).float().mean()


def train_draft_model(options: DemoOptions, directory: Path) -> float:
    """Trains until the budget is spent, and writes the model to `directory`.

    Returns the recent share of positions at which its first choice was the target's.
    """
    settings, device = options.draft_model, resolve_device(options.device)
    torch.manual_seed(options.seed)
    target = load_llama(options.target_dir).to(device).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(options.target_dir))
    documents = load_corpus().train
    if settings.domain == "prose":
        documents = tuple(Document(str(number), text) for number, text in enumerate(docstrings(documents)))
    stream = token_stream(tokenizer, documents)
    model = begin(target, settings).to(device)
    optimizers = Optimizers(model.named_parameters(), settings.matrix_rate, settings.embedding_rate, 0.0)
    loss_of = torch.compile(distillation_loss, dynamic=False) if options.compile else distillation_loss
    hits = 0.0

    def step(progress: TrainingProgress, fraction: float) -> tuple[Tensor, int, str]:
        nonlocal hits
        count = max(1, settings.tokens_per_step // settings.length)
        tokens = windows(stream, settings.length, count, (options.seed, progress.step))[:, :-1].to(device)
        loss, hit = loss_of(model, target, tokens, settings.first_choice)
        hits += (0.05 if progress.step else 1.0) * (float(hit) - hits)
        return loss, tokens.numel(), f"first choices {hits:.3f}"

    progress = train("draft-model", device, settings, optimizers, step)
    description = {
        "command": f"python -m backend.lab.demo --draft-model --draft-model-minutes {settings.minutes:g}"
        f" --draft-model-domain {settings.domain} --seed {options.seed}",
        "options": asdict(settings),
        "first_choices_of_the_target": round(hits, 4),
    }
    with replacing(directory) as fresh:
        save_llama(model.to(torch.bfloat16), fresh)
        save_tokenizer(tokenizer, fresh)
        write_json(fresh / RECORD, description | progress.spent())
    return hits
