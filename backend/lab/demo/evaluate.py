"""Measures the demo pair: loss and perplexity of the target, and the drafter's acceptance length.

Acceptance length is tokens per target step in greedy speculative decoding, over all prompts together: 1 + accepted draft
tokens / drafts.  Drafts have `DRAFT_LENGTH` tokens; the last draft of a prompt counts in full.  Decoding is a loop in plain
torch and float32, so that the figure needs no serving engine.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backend.lab.demo.drafter_model import chain
from backend.lab.demo.generate import generate, prompt_lengths
from backend.lab.demo.model import Target
from backend.lab.demo.target import validation_loss
from backend.lab.demo.training import Windows
from backend.learning.head import Drafter
from backend.models.writing import DRAFT_LENGTH

PROMPTS = 64
NEW_TOKENS = 128
PROMPT_SEED = 7
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 200


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Number of drafts, and of accepted draft tokens by position in the draft."""

    drafts: int
    accepted_by_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean tokens per target step, the target's own token included."""
        return 1.0 + sum(self.accepted_by_position) / max(1, self.drafts)


@dataclass(frozen=True, slots=True)
class Scores:
    """The figures that accompany a trained pair; loss in nats per token, over whole validation windows."""

    loss: float
    perplexity: float
    acceptance: Acceptance


def validation_prompts(stream: npt.NDArray[np.int32]) -> list[list[int]]:
    """Prompts from the validation stream, each starting with `<|begin|>`."""
    windows = Windows(stream, LONGEST_PROMPT, PROMPT_SEED).batch(0, PROMPTS)
    lengths = prompt_lengths(PROMPTS, SHORTEST_PROMPT, LONGEST_PROMPT, PROMPT_SEED)
    return [row[:length].tolist() for row, length in zip(windows, lengths, strict=True)]


@torch.no_grad()
def accept(target: Target, drafter: Drafter, prompt: list[int], new_tokens: int) -> Acceptance:
    """Greedy speculative decoding of one prompt until at least `new_tokens` are emitted."""
    device = drafter.fc.weight.device
    layers = drafter.shape.feature_layers
    capacity = len(prompt) + new_tokens + 2 * DRAFT_LENGTH + 2
    caches, cache = target.caches(1, capacity), drafter.cache(1, capacity)
    text = list(prompt)
    tokens = torch.tensor([prompt], device=device)
    drafts, accepted = 0, [0] * DRAFT_LENGTH
    hidden, features = target(tokens, caches, layers)
    text.append(int(target.logits(hidden[:, -1]).argmax()))
    while len(text) < len(prompt) + new_tokens:
        known = cache.length
        fresh = torch.tensor([text[known + 1 :]], device=device)
        draft = chain(drafter, fresh, drafter.fc(features), cache, DRAFT_LENGTH)[0].tolist()
        for layer in caches:
            layer.length = len(text) - 1
        hidden, features = target(torch.tensor([[text[-1], *draft]], device=device), caches, layers)
        choices: list[int] = target.logits(hidden[0]).argmax(-1).tolist()
        kept = matching_prefix(draft, choices)
        drafts += 1
        for position in range(kept):
            accepted[position] += 1
        text.extend(choices[: kept + 1])
        features = features[:, : kept + 1]
    return Acceptance(drafts, tuple(accepted))


def matching_prefix(draft: list[int], choices: list[int]) -> int:
    """Number of leading tokens of `draft` that equal the target's `choices`."""
    for position, (drafted, chosen) in enumerate(zip(draft, choices, strict=False)):
        if drafted != chosen:
            return position
    return len(draft)


def acceptance(target: Target, drafter: Drafter, stream: npt.NDArray[np.int32]) -> Acceptance:
    """Acceptance over prompts from `stream`; `acceptance_plan` describes them."""
    runs = [accept(target, drafter, prompt, NEW_TOKENS) for prompt in validation_prompts(stream)]
    by_position = tuple(sum(counts) for counts in zip(*(run.accepted_by_position for run in runs), strict=True))
    return Acceptance(sum(run.drafts for run in runs), by_position)


def acceptance_plan() -> str:
    """The prompts of `acceptance`, in words, for the training record."""
    return f"{PROMPTS} validation prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {NEW_TOKENS} new tokens each"


def evaluate(target: Target, drafter: Drafter, stream: npt.NDArray[np.int32], length: int) -> Scores:
    """All figures of a pair over the validation stream."""
    loss = validation_loss(target, stream, length)
    return Scores(loss=loss, perplexity=math.exp(loss), acceptance=acceptance(target, drafter, stream))


def sample(target: Target, prompt: Tensor, new_tokens: int) -> list[int]:
    """Greedy continuation of `prompt` `[n]`, without the prompt."""
    device = target.model.embed_tokens.weight.device
    text = generate(target, prompt[None].to(device), new_tokens, torch.zeros(1, device=device), torch.Generator(device=device))
    continuation: list[int] = text[0, len(prompt) :].tolist()
    return continuation
