"""Shared parts of the demo trainings: windows of tokens, and the training loop with its learning rates.

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
from torch import Tensor
from torch.nn import functional

from backend.lab.demo.options import Budget
from backend.lab.demo.tokenizer import BEGIN_ID
from backend.learning.optimizers import Optimizers

WARMUP = 0.03
DECAY_FROM = 0.35
REPORT_S = 20.0
LOGGER = logging.getLogger(__name__)
Stream = npt.NDArray[np.int32]
"""Token ids of documents, one after the other: `[num_tokens]`."""


def rate_factor(fraction: float) -> float:
    """Share of the full learning rate after `fraction` of the run: warm up, hold, then fall linearly to zero."""
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.05)
    if fraction < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - fraction) / (1.0 - DECAY_FROM))


def windows(stream: Stream, length: int, count: int, seed: tuple[int, ...]) -> Tensor:
    """`count` random windows of a stream, each after a `<|begin|>`: `[count, length + 1]`.  Raises `ValueError`."""
    if len(stream) < length:
        raise ValueError(f"a stream of {len(stream)} tokens is too short for windows of {length}")
    places = np.lib.stride_tricks.sliding_window_view(stream, length)
    chosen = places[np.random.default_rng(seed).integers(len(places), size=count)]
    return functional.pad(torch.from_numpy(chosen).long(), (1, 0), value=BEGIN_ID)


@dataclass(slots=True)
class TrainingProgress:
    """Progress of a run: steps and tokens done, and seconds spent."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    hits: Tensor = field(default_factory=lambda: torch.zeros(1))
    """Of a drafter: by place in the draft, the recent share of first choices that are the target's."""

    def fraction(self, budget: Budget) -> float:
        """Share of the run that is done, between 0 and 1."""
        done = self.step / budget.steps if budget.steps is not None else self.elapsed_s / (60.0 * budget.minutes)
        return min(1.0, done)

    def spent(self) -> dict[str, Any]:
        """Steps, tokens and minutes, and what a drafter has learned, for the record of the training."""
        found = {"steps": self.step, "tokens_seen": self.tokens, "minutes": round(self.elapsed_s / 60, 1)}
        hits = [round(each, 4) for each in self.hits.tolist()]
        return found | ({"first_choices_of_the_target": hits} if any(hits) else {})


def train(
    name: str,
    device: torch.device,
    budget: Budget,
    optimizers: Optimizers,
    step: Callable[[TrainingProgress, float], tuple[Tensor, Tensor | None, int]],
) -> TrainingProgress:
    """Trains until the budget is spent.

    `step` gets the run's progress and the share of the run that is done.  It returns the loss, of a drafter what goes into
    `TrainingProgress.hits`, and the number of tokens it read.
    """
    progress, reported = TrainingProgress(), time.monotonic()
    while (fraction := progress.fraction(budget)) < 1.0:
        began = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16):
            loss, hits, tokens = step(progress, fraction)
        torch.autograd.backward(loss)
        optimizers.step(rate_factor(fraction))
        progress.step += 1
        progress.tokens += tokens
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
