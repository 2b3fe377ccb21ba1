"""Shared parts of the demo trainings: texts to learn from, and the training loop with its learning rates.

A head learns from text that the target generated and from source code.  What a step teaches is the head's own: `drafter.py` for
one that drafts token by token, `dflash.py` for one that drafts in one pass.  The loss is that of heads that learn while they
serve (`backend/learning/lesson.py`), at temperature 1.

All randomness depends only on the seed and the step.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import generate
from backend.lab.demo.options import DrafterOptions, TrainingOptions
from backend.lab.demo.tokenizer import BEGIN_ID
from backend.learning.optimizers import Optimizers

WARMUP = 0.03
DECAY_FROM = 0.35
REPORT_S = 20.0
BATCH = 128
"""Rows that are generated together, from prompts of one length at one temperature."""
LOGGER = logging.getLogger(__name__)
Stream = npt.NDArray[np.int32]
"""Token ids of documents, one after the other: `[num_tokens]`."""
Draw = Callable[[int, int, np.random.Generator], Tensor]
"""(length, count, chance) -> the texts of a step: `[count, length]`, or one more token each."""
Lesson = Callable[[Tensor, float, np.random.Generator], tuple[Tensor, Tensor | None]]
"""(texts, share of the run that is done, chance) -> loss, and of a drafter, by place in the draft, the share of first choices
that are the target's."""


def rate_factor(fraction: float) -> float:
    """Share of the full learning rate after `fraction` of the run: warm up, hold, then fall linearly to zero."""
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.05)
    if fraction < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - fraction) / (1.0 - DECAY_FROM))


def windows(stream: Stream, length: int, count: int, chance: np.random.Generator) -> Tensor:
    """`count` random windows of a stream, each after a `<|begin|>`: `[count, length + 1]`.  Raises `ValueError`."""
    if len(stream) < length:
        raise ValueError(f"a stream of {len(stream)} tokens is too short for windows of {length}")
    places = np.lib.stride_tricks.sliding_window_view(stream, length)
    chosen = places[chance.integers(len(places), size=count)]
    return functional.pad(torch.from_numpy(chosen).long(), (1, 0), value=BEGIN_ID)


@torch.no_grad()
def training_texts(target: LlamaForCausalLM, stream: Stream, settings: DrafterOptions, seed: int) -> Draw:
    """Draws from short and long texts: what the target wrote at several temperatures, and source code.

    Prompts are 16 to 128 tokens of `stream`.
    """
    found: dict[int, Tensor] = {}
    torch.manual_seed(seed)
    chance = np.random.default_rng((seed, 1))
    for share, length in ((1.0 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        began, written = time.monotonic(), list[Tensor]()
        for temperature, part in settings.mixture:
            left = max(1, int(settings.generated_tokens * share * part / length))
            while left > 0:
                count, prompt = min(BATCH, left), int(chance.integers(16, min(128, length // 2) + 1))
                places = np.random.default_rng((seed, 2, length, len(written)))
                start = windows(stream, prompt, count, places)[:, :-1].to(target.device)
                written.append(generate(target, start, length - prompt, temperature).cpu())
                left -= count
        rows = torch.cat(written)
        LOGGER.info("drafter data: %d rows of %d in %.0f s", *rows.shape, time.monotonic() - began)
        count = max(1, int(len(rows) * settings.source_share))
        found[length] = torch.cat((rows, windows(stream, length, count, np.random.default_rng((seed, 3)))[:, :-1]))
    return lambda length, count, chance: found[length][chance.integers(len(found[length]), size=count)]


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a run: steps and tokens done, and seconds spent."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    hits: Tensor = field(default_factory=lambda: torch.zeros(1))
    """Of a drafter: by place in the draft, the recent share of first choices that are the target's."""

    def fraction(self, settings: TrainingOptions) -> float:
        """Share of the run that is done; 1 or more at its end."""
        return self.elapsed_s / (60.0 * settings.minutes) if settings.steps is None else self.step / settings.steps

    def spent(self) -> dict[str, Any]:
        """Steps, tokens and minutes, and what a drafter has learned, for the record of the training."""
        found = {"steps": self.step, "tokens_seen": self.tokens, "minutes": round(self.elapsed_s / 60, 1)}
        hits = [round(each, 4) for each in self.hits.tolist()]
        return found | ({"first_choices_of_the_target": hits} if any(hits) else {})


def train(name: str, model: nn.Module, settings: TrainingOptions, seed: int, draw: Draw, lesson: Lesson) -> TrainingProgress:
    """Trains a model until the time or the steps are spent."""
    device = next(model.parameters()).device
    optimizers = Optimizers(model.named_parameters(), settings.matrix_rate, settings.embedding_rate, settings.weight_decay)
    progress, reported = TrainingProgress(), time.monotonic()
    while (fraction := progress.fraction(settings)) < 1.0:
        began, chance = time.monotonic(), np.random.default_rng((seed, progress.step))
        length = settings.long_length if fraction >= 1.0 - settings.long_share else settings.length
        count = max(1, settings.tokens_per_step // length)
        with torch.autocast(device.type, torch.bfloat16):
            loss, hits = lesson(draw(length, count, chance).to(device), fraction, chance)
        torch.autograd.backward(loss)
        optimizers.step(rate_factor(fraction))
        progress.step += 1
        progress.tokens += count * length
        if hits is not None:
            progress.hits = progress.hits + 0.05 * (hits.cpu() - progress.hits)
        if began - reported > REPORT_S:
            reported = began
            speed = progress.tokens / max(progress.elapsed_s, 1e-9)
            line = "%s %5.1f%%  step %d  %.2fM tokens  %.0f tokens/s  loss %.4f  %s"
            right = " ".join(f"{each:.3f}" for each in progress.hits.tolist())
            LOGGER.info(line, name, 100 * fraction, progress.step, progress.tokens / 1e6, speed, loss.item(), right)
        progress.elapsed_s += time.monotonic() - began
    return progress
