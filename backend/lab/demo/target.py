"""Trains the demo target: next-token prediction on Python source within a wall-clock budget.

The learning rate follows the elapsed share of the budget, so the same call works on a slow CPU and on a fast GPU; only the
number of tokens seen differs.  The last part of the run uses longer windows.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import llama_config, new_llama
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.tokenizer import BEGIN_ID
from backend.lab.demo.training import Stream, TrainingProgress, train, windows

BATCH = 8
"""Windows of a validation batch."""


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


def train_target(options: DemoOptions, stream: Stream, device: torch.device) -> tuple[LlamaForCausalLM, TrainingProgress]:
    """Trains until the budget is spent."""
    settings = options.target
    torch.manual_seed(options.seed)
    config = llama_config(options.vocab_size, settings.hidden, settings.layers, 64, settings.positions)
    model = new_llama(config).to(device)
    loss_of = torch.compile(next_token_loss, dynamic=False) if options.compile else next_token_loss
    draw = partial(windows, stream)
    return model, train("target", model, settings, options.seed, draw, lambda tokens, *_: (loss_of(model, tokens), None))
