"""The chance that a draft token is accepted, from its signs.  Pure; verifiers fit the weights, drafters end drafts by them.

A drafter sends two signs per draft token: the value `log q(d) + G(d)` of the token it chose, and that token's lead over
the runner-up.  For place j of a draft

    chance = sigmoid(a * value + b * lead + e_j),    value and lead clipped to [-8, 8].

Drafts that are judged by rejection have other signs, because a chance must not depend on the token that was drawn: the value is
minus the entropy of q in nats, the lead the logarithm of its largest probability over its second largest.

(A logistic model of confidence and margin, as in vLLM's adaptive verification, vllm-project/vllm pull request 52992.)
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from math import exp
from typing import Any

import numpy as np
import numpy.typing as npt

CLIP = 8.0
"""Signs are cut to +-8.  Beyond it they say nothing more, and a single far one would outweigh all that was learned."""
STEEPEST = 30.0
"""Log-odds below -30 are cut there, so that `exp` does not overflow."""
FEW = 8
"""Drafts from which on arrays are faster than loops."""

Array = npt.NDArray[np.float64]
Chances = list[list[float]] | Array
"""The chances of many drafts' tokens; in an array, 0 behind a draft's end."""


class Rule(IntEnum):
    """How a request's drafts are judged; fixed for its life.  Also the place of its weights in `Next.chance_weights`."""

    GREEDY = 0
    """A draft token is accepted if it is the target's likeliest."""
    SHARED = 1
    """A draft token is accepted if it is the token that the target draws with the request's noise."""
    INDEPENDENT = 2
    """Rejection sampling (`backend/engine/worker/rejection.py`)."""


RULE_NAMES = {Rule.GREEDY: "greedy", Rule.SHARED: "shared_noise", Rule.INDEPENDENT: "rejection_sampling"}
"""The names of the rules in answers and records."""


def chances(weights: Sequence[float], signs: Sequence[float], offset: float = 0.0) -> list[float]:
    """The chance of each token of a draft, given that all before it are accepted.

    `weights`: `[a, b, e_0, ...]`; the last e holds for all later places, too.  `signs`: value and lead of the first token, of
    the second, and so on.  `offset` is added to every e.  Written out for speed, since verifiers compute it for every draft
    token between two steps.
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


def chances_of_many(weights: Sequence[float], drafts: Sequence[Sequence[float]], own: Sequence[float]) -> Chances:
    """`chances` of many drafts, with their signs and each one's own offset, over arrays."""
    if len(drafts) < FEW:
        return [chances(weights, signs, offset) for signs, offset in zip(drafts, own, strict=True)]
    flat = np.fmin(CLIP, np.fmax(-CLIP, np.fromiter(chain.from_iterable(drafts), float)))
    counts = np.array([len(signs) // 2 for signs in drafts])
    places = np.arange(counts.max())
    inside = places < counts[:, None]
    value, lead = np.zeros(inside.shape), np.zeros(inside.shape)
    value[inside], lead[inside] = flat[::2], flat[1::2]
    offsets = np.array(weights)[np.minimum(places + 2, len(weights) - 1)] + np.array(own)[:, None]
    return inside * chances_over(weights[0], weights[1], offsets, value, lead)


def chances_over(a: float | Array, b: float | Array, offsets: Array, value: npt.NDArray[Any], lead: npt.NDArray[Any]) -> Array:
    """The chances of tokens by their signs, cut to +-CLIP, over arrays."""
    found: Array = 1 / (1 + np.exp(np.minimum(-(a * value + b * lead + offsets), STEEPEST)))
    return found


def clipped(sign: float) -> float:
    """A sign cut to `[-CLIP, CLIP]`; NaN becomes -CLIP."""
    return min(CLIP, max(-CLIP, sign))
