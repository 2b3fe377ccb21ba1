"""Measures the demo pair: loss and perplexity of the target, and the drafter's acceptance length.

Acceptance length is tokens per target step in greedy speculative decoding, over all prompts together: 1 + accepted draft
tokens / drafts.  Drafts have `DRAFT_LENGTH` tokens; the last draft of a prompt counts in full.  A draft token is
accepted if it and all before it equal the target's greedy text, so that text alone judges drafts from all places at once.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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
ACCEPTANCE_PLAN = f"{PROMPTS} validation prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {NEW_TOKENS} new tokens each"
"""The prompts of `acceptance`, in words, for the training record."""


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
    acceptance: Acceptance

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def validation_prompts(stream: npt.NDArray[np.int32]) -> list[list[int]]:
    """Prompts from the validation stream, each starting with `<|begin|>`."""
    windows = Windows(stream, LONGEST_PROMPT, PROMPT_SEED).batch(0, PROMPTS)
    lengths = prompt_lengths(PROMPTS, SHORTEST_PROMPT, LONGEST_PROMPT, PROMPT_SEED)
    return [row[:length].tolist() for row, length in zip(windows, lengths, strict=True)]


@torch.no_grad()
def accept(target: Target, drafter: Drafter, prompt: list[int], new_tokens: int) -> Acceptance:
    """Greedy speculative decoding of one prompt until at least `new_tokens` are emitted."""
    prompts = torch.tensor(prompt, device=drafter.fc.weight.device)
    text = prompts.new_tensor([[*prompt, *sample(target, prompts, new_tokens + DRAFT_LENGTH)]])
    rows = text.shape[1] - DRAFT_LENGTH - 1
    _, features = target(text[:, :rows], feature_layers=drafter.shape.feature_layers)
    outputs = drafter.unroll(text[:, 1:], features, DRAFT_LENGTH)
    # Row p drafts the tokens from position p + 2 on.
    hits = [drafter.logits(output).argmax(-1)[0] == text[0, i + 2 : i + 2 + rows] for i, output in enumerate(outputs)]
    kept: list[int] = torch.stack(hits).cumprod(0).sum(0).tolist()
    drafts, accepted = 0, [0] * DRAFT_LENGTH
    length = len(prompt) + 1
    while length < len(prompt) + new_tokens:
        drafts += 1
        for position in range(kept[length - 2]):
            accepted[position] += 1
        length += kept[length - 2] + 1
    return Acceptance(drafts, tuple(accepted))


def acceptance(target: Target, drafter: Drafter, stream: npt.NDArray[np.int32]) -> Acceptance:
    """Acceptance over prompts from `stream`; `ACCEPTANCE_PLAN` describes them."""
    runs = [accept(target, drafter, prompt, NEW_TOKENS) for prompt in validation_prompts(stream)]
    by_position = tuple(sum(counts) for counts in zip(*(run.accepted_by_position for run in runs), strict=True))
    return Acceptance(sum(run.drafts for run in runs), by_position)


def evaluate(target: Target, drafter: Drafter, stream: npt.NDArray[np.int32], length: int) -> Scores:
    """All figures of a pair over the validation stream."""
    return Scores(validation_loss(target, stream, length), acceptance(target, drafter, stream))


def sample(target: Target, prompt: Tensor, new_tokens: int) -> list[int]:
    """Greedy continuation of `prompt` `[n]`, without the prompt."""
    device = target.model.embed_tokens.weight.device
    text = generate(target, prompt[None].to(device), new_tokens, torch.zeros(1, device=device), torch.Generator(device=device))
    continuation: list[int] = text[0, len(prompt) :].tolist()
    return continuation
