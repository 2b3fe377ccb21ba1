"""`train_demo`: trains a target on Python source, and then a head or draft model for it.  Each is written with a record.

The target learns next-token prediction.  The learning rate follows the elapsed share of the budget, so the same call works on a
slow CPU and on a fast GPU; only the number of tokens seen differs.  The last part of the run uses longer windows.
"""

import logging
import math
import platform
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from backend.lab.demo import dflash, draft_model, drafter
from backend.lab.demo.llama import llama_config, load_llama, new_llama, save_llama
from backend.lab.demo.options import DrafterOptions, TrainingOptions
from backend.lab.demo.tokenizer import BEGIN_ID, save_tokenizer, token_stream, train_tokenizer
from backend.lab.demo.training import Draw, Stream, TrainingProgress, train, training_texts, windows
from backend.models.writing import replacing, write_json
from backend.rollout.corpus import Corpus, load_corpus

LOGGER = logging.getLogger(__name__)
RECORD = "training.json"
BATCH = 8
"""Windows of a validation batch."""
HEADS: Mapping[str, ModuleType] = {"eagle3": drafter, "dflash": dflash, "draft-model": draft_model}
"""Each has `new_head`, `lesson` and `save_head`."""


def train_demo(options: Namespace) -> None:
    """Trains what the options ask for."""
    corpus, settings, kind = load_corpus(), options.drafter, HEADS[options.head]
    if options.target.minutes:
        _train_target(options, corpus)
    target = load_llama(options.target_dir).to(_device(options)).requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(options.target_dir))
    stream = token_stream(tokenizer, corpus.train)
    draw: Draw = (
        training_texts(target, stream, settings, options.seed)
        if isinstance(settings, DrafterOptions)
        else lambda length, count, chance: windows(stream, length, count, chance)[:, :-1]
    )
    torch.manual_seed(options.seed)
    head = kind.new_head(target, settings).to(target.device)
    progress = train(options.head, head, settings, options.seed, draw, kind.lesson(head, target, settings, options.compile))
    with replacing(options.drafter_dir) as fresh:
        kind.save_head(head, target, fresh)
        if kind is draft_model:
            save_tokenizer(tokenizer, fresh)
        write_json(fresh / RECORD, _record(options, settings, progress))


def _train_target(options: Namespace, corpus: Corpus) -> None:
    documents = (document.text for document in corpus.train)
    tokenizer = train_tokenizer(documents, options.target.vocab_size, options.target.positions)
    stream, validation = (token_stream(tokenizer, part) for part in (corpus.train, corpus.validation))
    target, progress = train_target(options, stream, _device(options))
    loss = validation_loss(target.eval(), validation, options.target.length)
    measured = {"validation_loss_nats_per_token": round(loss, 4), "validation_perplexity_per_token": round(math.exp(loss), 3)}
    LOGGER.info("measured: %s", measured)
    with replacing(options.target_dir) as fresh:
        save_llama(target, fresh)
        save_tokenizer(tokenizer, fresh)
        write_json(fresh / RECORD, _record(options, options.target, progress) | {"measured": measured})


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats of each of `tokens[:, 1:]`, given the tokens before it; `tokens` is `[batch, length + 1]`."""
    loss: Tensor = model(tokens, labels=tokens, use_cache=False).loss
    return loss


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, stream: Stream, length: int) -> float:
    """Mean loss per token over consecutive windows of `stream`, each after a `<|begin|>`.  Computed in float32."""
    rows = torch.from_numpy(stream[: len(stream) // length * length]).long().view(-1, length).to(model.device)
    parts = torch.split(functional.pad(rows, (1, 0), value=BEGIN_ID), BATCH)
    return sum(float(next_token_loss(model, part)) * len(part) for part in parts) / len(rows)


def train_target(options: Namespace, stream: Stream, device: torch.device) -> tuple[LlamaForCausalLM, TrainingProgress]:
    """Trains until the budget is spent."""
    settings = options.target
    torch.manual_seed(options.seed)
    config = llama_config(settings.vocab_size, settings.hidden, settings.layers, 64, settings.positions)
    model = new_llama(config).to(device)
    loss_of = torch.compile(next_token_loss, dynamic=False) if options.compile else next_token_loss
    draw = partial(windows, stream)
    return model, train("target", model, settings, options.seed, draw, lambda tokens, *_: (loss_of(model, tokens), None))


def _device(options: Namespace) -> torch.device:
    """The device of the options; `auto` is CUDA if available, else the CPU."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(found if options.device == "auto" else options.device)


def _record(options: Namespace, settings: TrainingOptions, progress: TrainingProgress) -> dict[str, Any]:
    source = f"standard library of Python {platform.python_version()}"
    return {"command": options.command, "source": source, "options": asdict(settings)} | progress.spent()
