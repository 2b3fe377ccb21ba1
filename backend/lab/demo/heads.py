"""Trains a draft head for a demo target against the target's distributions.

A head learns from text that the target generated and from source code.  What a step teaches is the head's own: `drafter.py` for
one that drafts token by token, `dflash.py` for one that drafts in one pass.  The loss is that of heads that learn while they
serve (`backend/learning/lesson.py`), at temperature 1.
"""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import generate
from backend.lab.demo.options import DemoOptions
from backend.lab.demo.training import Stream, TrainingProgress, train, windows
from backend.learning.optimizers import Optimizers

LOGGER = logging.getLogger(__name__)
BATCH = 128
"""Rows that are generated together, from prompts of one length at one temperature."""

Lesson = Callable[[Tensor, float, np.random.Generator], tuple[Tensor, Tensor]]
"""(tokens `[batch, length]`, share of the run that is done, chance) -> loss, and by place the share of first choices that are
the target's."""


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    if layers < 4:
        raise ValueError(f"a target of {layers} layers has no three inner layers to take features from")
    return (layers - 3, layers - 2, layers - 1)


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


def train_head(options: DemoOptions, head: nn.Module, lesson: Lesson, rows: tuple[Tensor, Tensor]) -> TrainingProgress:
    """Trains a head on `training_rows` until the budget is spent."""
    settings, (short, long) = options.drafter, rows
    device = next(head.parameters()).device
    optimizers = Optimizers(head.named_parameters(), settings.matrix_rate, settings.embedding_rate, settings.weight_decay)

    def step(progress: TrainingProgress, fraction: float) -> tuple[Tensor, Tensor, int]:
        chance = np.random.default_rng((options.seed, progress.step))
        present = long if fraction >= 1.0 - settings.long_share else short
        count = max(1, settings.tokens_per_step // present.shape[1])
        tokens = present[chance.integers(len(present), size=count)].to(device)
        return *lesson(tokens, fraction, chance), tokens.numel()

    return train(options.head, device, settings, optimizers, step)
