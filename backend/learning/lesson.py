"""The loss that trains a head, and its measure: unrolled steps over replayed sequences, compared with the target's answers.

Row p of a replay has the features of position p and the token at p + 1; its step j predicts the token at p + 2 + j.  The
target's scores for that token follow from its last hidden state at p + 1 + j, which is among the features.  So the target
itself need not run.

With p the target's distribution and q the head's, both at the request's temperature, a draft token is accepted with a
probability of about a = sum_v min(p_v, q_v).  The loss of a row's step is

    (1 - a) CE(p', q') + a (-log a)

where p' and q' are at temperature 1, CE is the cross entropy, and the weight a is not differentiated.  While little is
accepted, the gradient of -log a says little about what to change, so CE gets the weight (LK losses, arXiv 2602.23881).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from backend.learning.ring import Replay
from backend.learning.trainable import LONGEST, Pupil

STEP_WEIGHT = 0.9
"""Weight of each draft token in the loss, relative to the one before."""
LEAST = 1e-6
"""Least overlap, so that logarithms stay finite."""


@dataclass(frozen=True)
class LessonBatch:
    """Replays, padded at their ends.

    `tokens` `[batch, rows + 1]`; `features` `[batch, rows, width]`, those of the same positions; `answers` `[batch, rows + 1]`,
    whether the target generated that token; `temperatures` `[batch]`.
    """

    tokens: Tensor
    features: Tensor
    answers: Tensor
    temperatures: Tensor


def collate(replays: Sequence[Replay], device: torch.device) -> LessonBatch:
    """A batch of the replays' last `LONGEST` rows."""
    parts = [replay.last(LONGEST) for replay in replays]
    tokens = pad_sequence([part.tokens.long() for part in parts], batch_first=True)
    features = pad_sequence([part.features.float() for part in parts], batch_first=True)
    generated = [torch.arange(part.first, part.first + len(part.tokens)) >= part.prompt for part in parts]
    answers = pad_sequence(generated, batch_first=True)
    temperatures = torch.tensor([replay.temperature for replay in replays])
    return LessonBatch(tokens.to(device), features.to(device), answers.to(device), temperatures.to(device))


def loss_of(pupil: Pupil, batch: LessonBatch, depth: int) -> Tensor:
    """The loss of `depth` unrolled steps, a scalar."""
    outputs, rows = _unroll(pupil, batch, depth)
    # Scores take most of the memory: none are computed for prompts and padding.
    answered = batch.answers[:, 1:]
    places = answered.flatten().cumsum(0).view(answered.shape) - 1
    with torch.no_grad():
        goals = pupil.goals(batch.features[answered])
    losses = []
    for step, output in enumerate(outputs):
        wanted = batch.answers[:, step + 2 : step + 2 + rows]
        if not bool(wanted.any()):
            break
        drafted = pupil.drafter.logits(output[wanted]).float()
        goal = goals[places[:, step + 1 : step + 1 + rows][wanted]]
        warmth = batch.temperatures[:, None].expand_as(wanted)[wanted]
        losses.append(draft_losses(drafted, goal, warmth).mean())
    if not losses:
        return torch.zeros((), requires_grad=True)
    weights = torch.tensor([STEP_WEIGHT**step for step in range(len(losses))], device=batch.features.device)
    return (torch.stack(losses) * weights).sum() / weights.sum()


def draft_losses(drafted: Tensor, goal: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """The loss of each draft token `[n]`, of the head's and the target's scores `[n, vocab]`; temperatures None: 1."""
    overlap = _overlap(drafted, goal, torch.ones_like(drafted[:, 0]) if temperatures is None else temperatures)
    cross = -(goal.softmax(-1) * drafted.log_softmax(-1)).sum(-1)
    weight = overlap.detach()
    return (1 - weight) * cross - weight * overlap.clamp(min=LEAST).log()


@torch.no_grad()
def acceptance_lengths(pupil: Pupil, batch: LessonBatch, depth: int) -> list[float | None]:
    """For each replay, the mean tokens that a verification of a greedy draft of `depth` tokens would emit.

    A draft counts up to its first wrong token, so its later steps may read the text's tokens.  None: the replay is too short.
    """
    outputs, rows = _unroll(pupil, batch, depth)
    wanted = batch.answers[:, 2 : 2 + rows] & batch.answers[:, 1 + depth : 1 + depth + rows]
    alive = wanted.clone()
    accepted = torch.zeros(len(batch.tokens), device=batch.tokens.device)
    for step, output in enumerate(outputs):
        own_tokens = pupil.own_ids[batch.tokens[:, step + 2 : step + 2 + rows]]
        alive = alive & (pupil.drafter.logits(output).argmax(-1) == own_tokens)
        accepted += alive.sum(1)
    counts = wanted.sum(1)
    return [1 + float(a) / int(n) if n else None for a, n in zip(accepted, counts, strict=True)]


def _unroll(pupil: Pupil, batch: LessonBatch, depth: int) -> tuple[list[Tensor], int]:
    rows = batch.features.shape[1] - depth
    return (pupil.drafter.unroll(batch.tokens[:, 1:], batch.features[:, :rows], depth), rows) if rows > 0 else ([], 0)


def _overlap(drafted: Tensor, goal: Tensor, temperatures: Tensor) -> Tensor:
    """sum_v min(p_v, q_v) at each row's temperature; for a greedy row, q of the target's choice."""
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)[:, None]
    q = (drafted / scale).softmax(-1)
    overlap = 1 - (q - (goal / scale).softmax(-1)).relu().sum(-1)
    return torch.where(greedy, q.gather(-1, goal.argmax(-1, keepdim=True)).squeeze(-1), overlap)
