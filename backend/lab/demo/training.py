"""Shared parts of the demo trainings: windows of tokens, the training loop with its learning rates, and checkpoints.

All randomness depends only on the seed and on counters kept in the checkpoint.  So a run that was interrupted and resumed makes
the same steps as an uninterrupted one, if its length is given in steps and not in minutes.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from backend.lab.demo.options import Budget, DemoOptions
from backend.lab.demo.tokenizer import BEGIN_ID
from backend.learning.optimizers import Optimizers

WARMUP = 0.03
DECAY_FROM = 0.35
REPORT_S = 20.0
LOGGER = logging.getLogger(__name__)


def resolve_device(name: str) -> torch.device:
    """The device of this name; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def rate_factor(fraction: float) -> float:
    """Share of the full learning rate after `fraction` of the run: warm up, hold, then fall linearly to zero."""
    if fraction < WARMUP:
        return max(fraction / WARMUP, 0.05)
    if fraction < DECAY_FROM:
        return 1.0
    return max(0.0, (1.0 - fraction) / (1.0 - DECAY_FROM))


def goals(scores: Tensor, first_choice: float) -> tuple[Tensor, Tensor]:
    """Goal distributions `[..., vocab]` for a drafter, and first choices `[...]`, from the target's `scores` `[..., vocab]`.

    The first choice gets a weight of `first_choice`; the rest is the target's distribution at temperature 1.
    """
    scores = scores.float()
    choice = scores.argmax(-1)
    goal = scores.softmax(-1) * (1.0 - first_choice)
    return goal.scatter_add_(-1, choice[..., None], torch.full_like(goal[..., :1], first_choice)), choice


class Rows(ABC):
    """An endless sequence of rows of token ids, in an order that is shuffled anew every epoch."""

    def __init__(self, length: int, per_epoch: int) -> None:
        """`length` input tokens are in a row; each row has one more, which is only predicted."""
        self.length, self.per_epoch = length, per_epoch
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @abstractmethod
    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Where the rows of an epoch are: `[per_epoch]`."""

    @abstractmethod
    def row(self, at: int) -> npt.NDArray[np.int32]:
        """The row at a place that `order` named: `[length + 1]`."""

    def batch(self, first: int, count: int) -> Tensor:
        """Rows number `first` to `first + count`: `[count, length + 1]` token ids."""
        rows = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.per_epoch)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self.order(epoch)
            rows.append(self.row(int(self._order[place])))
        return torch.from_numpy(np.stack(rows)).long()


class Windows(Rows):
    """Windows of a token stream, each after a `<|begin|>`."""

    def __init__(self, stream: npt.NDArray[np.int32], length: int, seed: int) -> None:
        super().__init__(length, (len(stream) - length) // length)
        self.stream, self.seed = stream, seed
        if self.per_epoch < 1:
            raise ValueError(f"a stream of {len(stream)} tokens is too short for windows of {length}")

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, self.length, epoch))
        phase = int(generator.integers(self.length))
        return phase + self.length * generator.permutation(self.per_epoch)

    def row(self, at: int) -> npt.NDArray[np.int32]:
        return np.concatenate(([BEGIN_ID], self.stream[at : at + self.length]), dtype=np.int32)


@dataclass(slots=True)
class Progress:
    """Progress of a run: steps and tokens done, seconds spent, and numbers of windows drawn, by window length."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    drawn: dict[int, int] = field(default_factory=dict)

    def fraction(self, minutes: float, steps: int | None) -> float:
        """Share of the run that is done, between 0 and 1."""
        done = self.step / steps if steps is not None else self.elapsed_s / (60.0 * minutes)
        return min(1.0, done)

    def draw(self, rows: Rows, count: int) -> Tensor:
        first = self.drawn.get(rows.length, 0)
        self.drawn[rows.length] = first + count
        return rows.batch(first, count)


def save_state(path: Path, model: nn.Module, optimizers: Optimizers, progress: Progress) -> None:
    """Write a checkpoint atomically."""
    state = {
        "model": dict(model.state_dict()),
        "optimizers": [part.state_dict() for part in optimizers.parts],
        "progress": asdict(progress),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    torch.save(state, temporary)
    temporary.replace(path)


def load_state(path: Path, model: nn.Module, optimizers: Optimizers) -> Progress:
    """Load the checkpoint at `path` into model and optimizers, and return its progress; without one, start at 0."""
    if not path.exists():
        return Progress()
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for part, saved in zip(optimizers.parts, state["optimizers"], strict=True):
        part.load_state_dict(saved)
    progress = Progress(**state["progress"])
    LOGGER.info("resuming at step %d, %.1f minutes in", progress.step, progress.elapsed_s / 60)
    return progress


def train(
    name: str,
    options: DemoOptions,
    budget: Budget,
    model: nn.Module,
    optimizers: Optimizers,
    step: Callable[[Progress, float], tuple[Tensor, int, str]],
    on_checkpoint: Callable[[Progress], None] | None = None,
) -> Progress:
    """Trains until the budget is spent, resuming from a checkpoint in `run_dir` if there is one.

    `step` gets the run's progress and the share of the run that is done.  It returns the loss, the number of tokens it read,
    and a text for the log.  `on_checkpoint` is called after every checkpoint but the last.
    """
    path, device = Path(options.run_dir) / f"{name}.pt", resolve_device(options.device)
    progress = load_state(path, model, optimizers)
    reported = saved = time.monotonic()
    while (fraction := progress.fraction(budget.minutes, budget.steps)) < 1.0:
        began = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16):
            loss, tokens, told = step(progress, fraction)
        torch.autograd.backward(loss)
        optimizers.step(rate_factor(fraction))
        progress.step += 1
        progress.tokens += tokens
        if began - reported > REPORT_S:
            reported = began
            speed = progress.tokens / max(progress.elapsed_s, 1e-9)
            line = "%s %5.1f%%  step %d  %.2fM tokens  %.0f tokens/s  loss %.4f  %s"
            LOGGER.info(line, name, 100 * fraction, progress.step, progress.tokens / 1e6, speed, loss.item(), told)
        if began - saved > options.checkpoint_s:
            saved = began
            save_state(path, model, optimizers, progress)
            if on_checkpoint is not None:
                on_checkpoint(progress)
        progress.elapsed_s += time.monotonic() - began
    save_state(path, model, optimizers, progress)
    return progress
