"""The chance that a draft token is accepted, from what its drafter saw of it.  Pure; verifiers fit it, drafters stop by it.

A drafter sends two signs per draft token: the value `log q(d) + tau G(d)` of the token it chose, and that token's lead over
the runner-up.  For place j of a draft

    chance = sigmoid(a * value + b * lead + e_j),    value and lead clipped to [-8, 8].

(A logistic model of confidence and margin, as in vLLM's adaptive verification, vllm-project/vllm pull request 52992.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

CLIP = 8.0
"""Beyond it a sign says nothing more, and one far off would outweigh all that was learnt."""
STEEPEST = 30.0
"""Log-odds beyond it are certainty, and must not overflow."""


def chance(weights: Sequence[float], place: int, value: float, lead: float) -> float:
    """Of one token; `weights` are `[a, b, e_0, ...]`, the last of which holds for all places from there on."""
    odds = weights[0] * clipped(value) + weights[1] * clipped(lead) + weights[min(place + 2, len(weights) - 1)]
    return 1 / (1 + exp(-odds if odds > -STEEPEST else STEEPEST))


def chances(weights: Sequence[float], signs: Sequence[float], offset: float = 0.0) -> list[float]:
    """Of each token of a draft, were all before it accepted; `signs` are value and lead of one token after the other.

    `offset` is added to all of e.  Written out, since verifiers do this for every draft token between two steps.
    """
    a, b, *offsets = weights
    offsets += offsets[-1:] * (len(signs) // 2 - len(offsets))
    found = []
    for value, lead, own in zip(signs[::2], signs[1::2], offsets, strict=False):
        if not -CLIP <= value <= CLIP:
            value = clipped(value)
        if not -CLIP <= lead <= CLIP:
            lead = clipped(lead)
        odds = a * value + b * lead + own + offset
        found.append(1 / (1 + exp(-odds if odds > -STEEPEST else STEEPEST)))
    return found


def clipped(sign: float) -> float:
    """A sign within its limits; the lowest for what is not a number."""
    return min(CLIP, max(-CLIP, sign))
