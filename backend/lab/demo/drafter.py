"""Makes the demo's drafter, an EAGLE-3 head, and trains it against the target's distributions.

It learns from text that the target generated and from source code.  Each step unrolls the drafter as decoding would
(`Drafter.unroll`), so that later draft positions learn from the drafter's own outputs.  Part of the goal's weight goes to the
target's first choice (`first_choice`), which alone decides greedy acceptance.
"""

import logging
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend.lab.demo.generate import generated_rows
from backend.lab.demo.model import Target
from backend.lab.demo.options import DemoOptions, DrafterOptions
from backend.lab.demo.training import Progress, Rows, Windows, goals, resolve_device, train
from backend.learning.head import Drafter, DrafterShape
from backend.learning.optimizers import Optimizers

LOGGER = logging.getLogger(__name__)
ROWS = "drafter-rows.npz"
STEP_WEIGHT = 0.9
EMBEDDING_SCALE = 0.3  # of the new attention inputs, against the full scale of the copied ones


class FixedRows(Rows):
    """Rows that are the same in every epoch: `[count, length + 1]` token ids."""

    def __init__(self, rows: npt.NDArray[np.int32], seed: int) -> None:
        super().__init__(rows.shape[1] - 1, len(rows))
        self.rows, self.seed = rows, seed

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.rows))

    def row(self, at: int) -> npt.NDArray[np.int32]:
        row: npt.NDArray[np.int32] = self.rows[at]
        return row


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    if layers < 4:
        raise ValueError(f"a target of {layers} layers has no three inner layers to take features from")
    return (layers - 3, layers - 2, layers - 1)


def new_drafter(target: Target) -> Drafter:
    """A new drafter that starts from its target's last layer, output matrix and norm.

    `fc` starts as a copy of the last feature, which is the input of that layer; weights for embeddings start random and small.
    """
    shape = DrafterShape(replace(target.shape, num_hidden_layers=1), default_feature_layers(target.shape.num_hidden_layers))
    embeddings = target.model.embed_tokens.weight
    drafter = Drafter(shape, embeddings).to(embeddings.device)
    last, block, hidden = target.model.last_block, drafter.block, target.shape.hidden_size
    with torch.no_grad():
        drafter.lm_head.weight.copy_(embeddings)
        drafter.norm.weight.copy_(target.model.norm.weight)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        block.hidden_norm.weight.copy_(last.input_layernorm.weight)
        block.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = block.self_attn.get_parameter(f"{name}.weight")
            weight[:, :hidden].mul_(EMBEDDING_SCALE)
            weight[:, hidden:].copy_(last.self_attn.get_parameter(f"{name}.weight"))
        block.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight)
        block.mlp.load_state_dict(last.mlp.state_dict())
    return drafter


def drafter_rows(
    target: Target, stream: npt.NDArray[np.int32], settings: DrafterOptions, seed: int
) -> tuple[FixedRows, FixedRows]:
    """The short and the long training rows: text that the target generated at several temperatures, and source code."""
    sets: list[FixedRows] = []
    for share, length in ((1.0 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        count = max(1, int(settings.generated_tokens * share / length))
        began = time.monotonic()
        written = generated_rows(target, stream, count, length + 1, settings.mixture, seed)
        LOGGER.info("drafter data: %d rows of %d in %.0f s", *written.shape, time.monotonic() - began)
        windows = Windows(stream, length, seed + 1)
        source = windows.batch(0, max(1, int(count * settings.source_share))).numpy().astype(np.int32)
        sets.append(FixedRows(np.concatenate((written, source)), seed))
    return sets[0], sets[1]


def unroll_depth(fraction: float, depth: int) -> int:
    """Steps to unroll after `fraction` of the run: it grows, because later steps build on the first."""
    if fraction < 0.2:
        return 1
    return min(depth, 2) if fraction < 0.45 else depth


def _kept_rows(path: Path, target: Target, stream: npt.NDArray[np.int32], options: DemoOptions) -> tuple[FixedRows, FixedRows]:
    """The training rows, generated once per run directory."""
    if not path.exists():
        short, long = drafter_rows(target, stream, options.drafter, options.seed)
        temporary = path.with_suffix(".writing.npz")
        np.savez(temporary, short=short.rows, long=long.rows)
        temporary.replace(path)
    with np.load(path) as kept:
        return FixedRows(kept["short"], options.seed), FixedRows(kept["long"], options.seed)


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
