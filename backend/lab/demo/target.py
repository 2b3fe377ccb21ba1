"""Trains the demo target: next-token prediction on Python source within a wall-clock budget.

The learning rate follows the elapsed share of the budget, so the same call works on a slow CPU and on a fast GPU; only the
number of tokens seen differs.  The last part of the run uses longer windows.
"""

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.training import Progress, Windows, resolve_device, train
from backend.learning.layers import Shape
from backend.learning.optimizers import Optimizers

LOGGER = logging.getLogger(__name__)


def target_shape(options: DemoOptions) -> Shape:
    return Shape(
        vocab_size=options.vocab_size,
        hidden_size=options.target.hidden,
        num_hidden_layers=options.target.layers,
        num_attention_heads=options.target.hidden // 64,
        num_key_value_heads=max(1, options.target.hidden // 128),
        intermediate_size=options.target.hidden * 11 // 4,
        max_position_embeddings=options.target.positions,
    )


def next_token_loss(model: Target, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats of each of `tokens[:, 1:]`, given the tokens before it; `tokens` is `[batch, length + 1]`."""
    hidden, _ = model(tokens[:, :-1])
    return functional.cross_entropy(model.logits(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validation_loss(
    model: Target, stream: npt.NDArray[np.int32], length: int, limit: int | None = None, batch: int = 8
) -> float:
    """Mean loss per token over consecutive windows of `stream`, or over `limit` of them at equal distances.

    Every window starts with `<|begin|>` and an empty context, as in training.  Computed in float32.
    """
    device = model.model.embed_tokens.weight.device
    count = (len(stream) - 1) // length
    order = list(range(count))
    if limit is not None and limit < count:
        order = order[:: count // limit][:limit]
    total = 0.0
    for first in range(0, len(order), batch):
        rows = np.stack([stream[number * length : (number + 1) * length] for number in order[first : first + batch]])
        tokens = functional.pad(torch.from_numpy(rows.astype(np.int64)), (1, 0), value=0).to(device)
        total += float(next_token_loss(model, tokens)) * len(rows)
    return total / len(order)


def train_target(
    options: DemoOptions,
    train_stream: npt.NDArray[np.int32],
    validation: npt.NDArray[np.int32],
    on_checkpoint: Callable[[Target, Progress], None] | None = None,
) -> tuple[Target, Progress]:
    """Train until the budget is spent, resuming from a checkpoint in `run_dir` if there is one.

    `train_stream` and `validation` are token streams.  `on_checkpoint` is called after every checkpoint but the last.
    """
    settings, device = options.target, resolve_device(options.device)
    torch.manual_seed(options.seed)
    model = Target(target_shape(options)).to(device)
    optimizers = Optimizers(model.named_parameters(), settings.matrix_rate, settings.embedding_rate, settings.weight_decay)
    loss_of = torch.compile(next_token_loss, dynamic=False) if options.compile else next_token_loss
    short = Windows(train_stream, settings.length, options.seed)
    long = Windows(train_stream, settings.long_length, options.seed)

    def step(progress: Progress, fraction: float) -> tuple[Tensor, int, str]:
        windows = long if fraction >= 1.0 - settings.long_share else short
        tokens = progress.draw(windows, max(1, settings.tokens_per_step // windows.length)).to(device)
        return loss_of(model, tokens), tokens.shape[0] * (tokens.shape[1] - 1), ""

    def checkpoint(progress: Progress) -> None:
        LOGGER.info("target validation %.4f", validation_loss(model, validation, settings.length, limit=48))
        if on_checkpoint is not None:
            on_checkpoint(model, progress)

    return model, train("target", options, settings, model, optimizers, step, checkpoint)
