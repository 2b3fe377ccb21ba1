"""Trains the demo drafter on text that the target generated and on source code, against the target's distributions.

Each step unrolls the drafter as decoding would (`Drafter.unroll`), so that later draft positions learn from the drafter's own
outputs.  Part of the goal's weight goes to the target's first choice (`first_choice`), which alone decides greedy acceptance.
"""

import logging
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend.lab.demo.drafter_model import new_drafter
from backend.lab.demo.generate import generated_rows
from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions, DrafterOptions
from backend.lab.demo.training import Progress, Windows, goals, resolve_device, train
from backend.learning.head import Drafter
from backend.learning.optimizers import Optimizers

LOGGER = logging.getLogger(__name__)
ROWS = "drafter-rows.npz"
STEP_WEIGHT = 0.9


class Rows:
    """Fixed rows of token ids `[count, length + 1]`, in an order that is shuffled anew every epoch."""

    def __init__(self, rows: npt.NDArray[np.int32], seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.length = rows.shape[1] - 1
        self._epoch: tuple[int, npt.NDArray[np.int64]] | None = None

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.rows)))
        return self._epoch[1]

    def batch(self, first: int, count: int) -> Tensor:
        """Rows number `first` to `first + count` of the endless sequence."""
        places = [divmod(number, len(self.rows)) for number in range(first, first + count)]
        return torch.from_numpy(np.stack([self.rows[self._order(epoch)[place]] for epoch, place in places])).long()


def drafter_rows(target: Target, stream: npt.NDArray[np.int32], settings: DrafterOptions, seed: int) -> tuple[Rows, Rows]:
    """The short and the long training rows: text that the target generated at several temperatures, and source code."""
    sets: list[Rows] = []
    for share, length in ((1.0 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        count = max(1, int(settings.generated_tokens * share / length))
        began = time.monotonic()
        written = generated_rows(target, stream, count, length + 1, settings.mixture, seed)
        LOGGER.info("drafter data: %d rows of %d in %.0f s", *written.shape, time.monotonic() - began)
        windows = Windows(stream, length, seed + 1)
        source = windows.batch(0, max(1, int(count * settings.source_share))).numpy().astype(np.int32)
        sets.append(Rows(np.concatenate((written, source)), seed))
    return sets[0], sets[1]


def unroll_depth(fraction: float, depth: int) -> int:
    """Steps to unroll after `fraction` of the run: it grows, because later steps build on the first."""
    if fraction < 0.2:
        return 1
    return min(depth, 2) if fraction < 0.45 else depth


def _kept_rows(path: Path, target: Target, stream: npt.NDArray[np.int32], options: DemoOptions) -> tuple[Rows, Rows]:
    """The training rows, generated once per run directory."""
    if not path.exists():
        short, long = drafter_rows(target, stream, options.drafter, options.seed)
        temporary = path.with_suffix(".writing.npz")
        np.savez(temporary, short=short.rows, long=long.rows)
        temporary.replace(path)
    with np.load(path) as kept:
        return Rows(kept["short"], options.seed), Rows(kept["long"], options.seed)


def unrolled_loss(drafter: Drafter, target: Target, tokens: Tensor, depth: int, first_choice: float) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy over the draft positions, and each position's share of first choices that are the target's.

    `tokens` is `[batch, length]`.  The second result is `[depth]`.
    """
    rows = tokens.shape[1] - depth - 1
    with torch.no_grad():
        hidden, features = target(tokens, feature_layers=drafter.shape.feature_layers)
        goal, choice = goals(target.logits(hidden), first_choice)
    outputs = drafter.unroll(tokens[:, 1:], features[:, :rows], depth)
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for step, output in enumerate(outputs):
        place = slice(step + 1, step + 1 + rows)
        drafted = drafter.logits(output).float().flatten(0, 1)
        losses.append(functional.cross_entropy(drafted, goal[:, place].flatten(0, 1)))
        hits.append((drafted.detach().argmax(-1) == choice[:, place].flatten()).float().mean())
    weights = torch.tensor([STEP_WEIGHT**step for step in range(depth)], device=tokens.device)
    return (torch.stack(losses) * weights).sum() / weights.sum(), torch.stack(hits)


def train_drafter(options: DemoOptions, target: Target, stream: npt.NDArray[np.int32]) -> tuple[Drafter, Progress]:
    """Train a drafter for `target` until the budget is spent, resuming from `run_dir`; `stream` holds token ids."""
    settings, device = options.drafter, resolve_device(options.device)
    torch.manual_seed(options.seed)
    target = target.to(device).eval().requires_grad_(False)
    drafter = new_drafter(target)
    optimizers = Optimizers(drafter.named_parameters(), settings.matrix_rate, settings.embedding_rate, settings.weight_decay)
    short, long = _kept_rows(Path(options.run_dir) / ROWS, target, stream, options)
    loss_of = torch.compile(unrolled_loss, dynamic=False) if options.compile else unrolled_loss
    hits = torch.zeros(settings.unroll)

    def step(progress: Progress, fraction: float) -> tuple[Tensor, int, str]:
        rows = long if fraction >= 1.0 - settings.long_share else short
        count = max(1, settings.tokens_per_step // rows.length)
        tokens = progress.draw(rows, count)[:, : rows.length].to(device)  # the goals come from the target itself
        depth = unroll_depth(fraction, settings.unroll)
        loss, hit = loss_of(drafter, target, tokens, depth, settings.first_choice)
        hits[:depth] += 0.05 * (hit.cpu() - hits[:depth])
        return loss, tokens.numel(), "first choices " + " ".join(f"{each:.3f}" for each in hits.tolist())

    return drafter, train("drafter", options, settings, drafter, optimizers, step)
