"""Judges sampled drafts: block verification (Sun et al., arXiv 2403.10444).  Worker process, on the thread that runs the model.

A draft x_1..x_n was sampled from q_1..q_n.  With the target's distributions p (after all processors) and uniform numbers u,

    p_0 = 1,    p_i = min(p_(i-1) p(x_i) / q_i(x_i), 1)
    Z_i = sum over v of max(p_i p(v | x_1..x_i) - q_(i+1)(v), 0)
    h_i = Z_i / (Z_i + 1 - p_i)  for 0 < i < n,    h_n = p_n

The largest i with u_i <= h_i is accepted, or none.  The next token is drawn from max(p_i p - q_(i+1), 0), normalised; after the
whole draft, from p.  So the text has exactly the target's distribution, provided that u, the noise of the next token, and the
noise of the draft are independent of each other, and that the decision to verify x_i did not depend on x_i or what follows it.

q_i is zero outside its few listed tokens, so p is needed only there, and as one log-sum-exp per row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from backend.speculation.proposals import Proposal

NEVER = float("-inf")


class Judged(NamedTuple):
    """The outcome of verifying the drafts of some requests."""

    accepted: Tensor
    """Draft tokens accepted, int64 `[requests]`."""
    last: Tensor
    """Logits from which each request's next token is drawn, float32 `[requests, V]`."""


def table_of(
    drafts: Sequence[Sequence[int]], proposals: Sequence[Proposal | None]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The drafts of requests, padded to the longest draft D and the widest proposal M.

    Returns the tokens `[requests, D]`, token ids `[requests, D, M]` and their probabilities.  A token without a proposal is
    certain.  Padding has id 0 and probability 0.
    """
    deepest = max(map(len, drafts))
    width = max((each.ids.shape[1] for each in proposals if each is not None), default=1)
    ids = np.zeros((len(drafts), deepest, width), np.int64)
    chances = np.zeros((len(drafts), deepest, width), np.float32)
    tokens = np.zeros((len(drafts), deepest), np.int64)
    for i, (draft, proposal) in enumerate(zip(drafts, proposals, strict=True)):
        n = len(draft)
        tokens[i, :n] = draft
        if proposal is None:
            ids[i, :n, 0], chances[i, :n, 0] = draft, 1.0
        else:
            own = proposal.ids.shape[1]
            ids[i, :n, :own], chances[i, :n, :own] = proposal.ids[:n], proposal.chances[:n]
    return tokens, ids, chances


def judge(logits: Tensor, rows: Tensor, lengths: Tensor, tokens: Tensor, ids: Tensor, q: Tensor, u: Tensor) -> Judged:
    """Verifies drafts of at most D tokens.

    `logits` `[all rows, V]` after all processors.  `rows` int64 `[requests, D + 1]`: the row behind each number of draft
    tokens; a request's last row fills up missing ones.  `lengths` int64 `[requests]`: draft tokens.  `tokens` int64
    `[requests, D]`;
    `ids` int64 and `q` float32 `[requests, D, M]`: the distributions they were drawn from.  `u` float32 `[requests, D]`.
    """
    totals = torch.logsumexp(logits, 1)[rows]
    listed = logits.flatten()[rows[:, :-1].unsqueeze(2) * logits.shape[1] + ids] - totals[:, :-1].unsqueeze(2)
    given = q > 0
    p = torch.where(given, listed.exp(), 0.0)
    is_drawn = given & (ids == tokens.unsqueeze(2))
    # With L_i = log p(x_1)/q_1(x_1) + ... + log p(x_i)/q_i(x_i):  log p_i = L_i - max(0, L_1, ..., L_i).
    level = torch.where(is_drawn, listed - q.log(), NEVER).amax(2).cumsum(1)
    reached = (level - level.cummax(1).values.clamp(min=0.0)).exp()
    before = functional.pad(reached, (1, 0), value=1.0)
    excess = (before[:, :-1].unsqueeze(2) * p - q).clamp(min=0.0)
    rest = excess.sum(2) + before[:, :-1] * (1.0 - p.sum(2)).clamp(min=0.0)
    room = rest[:, 1:] + 1.0 - before[:, 1:-1]
    stops = functional.pad(torch.where(room > 0, rest[:, 1:] / room, 1.0), (0, 1))
    steps, ends = torch.arange(1, tokens.shape[1] + 1, device=logits.device), lengths.unsqueeze(1)
    stops = torch.where(steps == ends, reached, stops)
    accepted = torch.where((u <= stops) & (steps <= ends), steps, 0).amax(1)

    # The logits of each request's next token.  Where the draft ended there is no q: what is computed for it is not used.
    at = accepted.unsqueeze(1)
    whole = logits[rows.gather(1, at).squeeze(1)]
    wide = at.clamp(max=tokens.shape[1] - 1).unsqueeze(2).expand(-1, -1, ids.shape[2])
    excess, given, ids = (each.gather(1, wide).squeeze(1) for each in (excess, given, ids))
    left = excess.log() - before.gather(1, at).log() + totals.gather(1, at)
    # What q has in common with p is taken away, so no logit grows.
    residual = whole.scatter_reduce(1, ids, left.masked_fill(~given, math.inf), "amin")
    is_used = (accepted < lengths) & (residual.amax(1) > NEVER)
    return Judged(accepted, torch.where(is_used.unsqueeze(1), residual, whole))
