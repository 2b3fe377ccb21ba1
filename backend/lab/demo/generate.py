"""Generates text with the demo target, for the drafter to learn from.

Owns batched decoding with a cache.  All prompts of a batch have one length, so nothing is padded.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.lab.demo.model import Target
from backend.lab.demo.training import Windows


@torch.no_grad()
def generate(target: Target, prompts: Tensor, new_tokens: int, temperatures: Tensor, source: torch.Generator) -> Tensor:
    """Continue `prompts` `[batch, n]` by `new_tokens`, row i at `temperatures[i]`; 0 is greedy.

    Sampling adds Gumbel noise scaled by the temperature and takes the maximum.  It draws from the softmax, and needs no special
    case for greedy rows.  Returns prompts and continuations, `[batch, n + new_tokens]`; an end of text does not stop a row.
    """
    batch, prompt_length = prompts.shape
    text = torch.empty(batch, prompt_length + new_tokens, dtype=torch.long, device=prompts.device)
    text[:, :prompt_length] = prompts
    caches = target.caches(batch, prompt_length + new_tokens)
    fresh = prompts
    for place in range(prompt_length, prompt_length + new_tokens):
        hidden, _ = target(fresh, caches)
        scores = target.logits(hidden[:, -1])
        noise = torch.empty_like(scores).exponential_(generator=source).log_().neg_()
        fresh = (scores + temperatures[:, None] * noise).argmax(-1, keepdim=True)
        text[:, place : place + 1] = fresh
    return text


def prompt_lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """`count` random prompt lengths between `shortest` and `longest`, both included; determined by `seed`."""
    generator = np.random.default_rng((seed, 1))
    return [int(length) for length in generator.integers(shortest, longest + 1, size=count)]


def row_temperatures(mixture: Sequence[tuple[float, float]], count: int) -> list[float]:
    """A temperature for each of `count` rows; `mixture` has pairs of temperature and share."""
    bounds = np.cumsum([share for _, share in mixture])
    places = (np.arange(count) + 0.5) / count * bounds[-1]
    return [mixture[int(np.searchsorted(bounds, place))][0] for place in places]


def generated_rows(
    target: Target,
    stream: npt.NDArray[np.int32],
    rows: int,
    length: int,
    mixture: Sequence[tuple[float, float]],
    seed: int,
    batch: int = 128,
) -> npt.NDArray[np.int32]:
    """`[rows, length]`: prompts of 16 to 128 tokens of `stream`, continued by the target at mixed temperatures."""
    device = target.model.embed_tokens.weight.device
    prompts = Windows(stream, 128, seed)
    source = torch.Generator(device=device).manual_seed(seed)
    parts: list[npt.NDArray[np.int32]] = []
    for number, prompt_length in enumerate(prompt_lengths(-(-rows // batch), 16, min(128, length // 2), seed)):
        count = min(batch, rows - number * batch)
        start = prompts.batch(number * batch, count)[:, :prompt_length].to(device)
        temperatures = torch.tensor(row_temperatures(mixture, count), device=device)
        text = generate(target, start, length - prompt_length, temperatures, source)
        parts.append(text.cpu().numpy().astype(np.int32))
    return np.concatenate(parts)
