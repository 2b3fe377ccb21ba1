"""Measures the demo pair: loss and perplexity of the target, and the drafter's acceptance length.

Acceptance length is tokens per target step in greedy speculative decoding, over all prompts together: 1 + accepted draft
tokens / drafts.  Drafts have `DRAFT_LENGTH` tokens; the last draft of a prompt counts in full.  A draft token is
accepted if it and all before it equal the target's greedy text, so that text alone judges drafts from all places at once.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import features, generate
from backend.lab.demo.target import validation_loss
from backend.lab.demo.training import Stream, windows
from backend.learning.head import Drafter
from backend.models.writing import DRAFT_LENGTH

PROMPTS = 64
NEW_TOKENS = 128
PROMPT_SEED = 7
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 200
ACCEPTANCE_PLAN = f"{PROMPTS} validation prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {NEW_TOKENS} new tokens each"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Number of drafts, and of accepted draft tokens by position in the draft."""

    drafts: int
    accepted_by_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean tokens per target step, the target's own token included."""
        return 1.0 + sum(self.accepted_by_position) / max(1, self.drafts)


@torch.no_grad()
def accept(target: LlamaForCausalLM, drafter: Drafter, prompt: Tensor, new_tokens: int) -> Acceptance:
    """Greedy speculative decoding of one prompt `[n]` until at least `new_tokens` are emitted."""
    text = generate(target, prompt[None], new_tokens + DRAFT_LENGTH)
    rows = text.shape[1] - DRAFT_LENGTH - 1
    _, inputs = features(target, text[:, :rows], drafter.feature_layers)
    outputs = drafter.unroll(text[:, 1:], inputs, DRAFT_LENGTH)
    # Row p drafts the tokens from position p + 2 on.
    hits = [drafter.logits(output).argmax(-1)[0] == text[0, i + 2 : i + 2 + rows] for i, output in enumerate(outputs)]
    kept: list[int] = torch.stack(hits).cumprod(0).sum(0).tolist()
    drafts, accepted = 0, [0] * DRAFT_LENGTH
    length = len(prompt) + 1
    while length < len(prompt) + new_tokens:
        right = kept[length - 2]
        drafts += 1
        for position in range(right):
            accepted[position] += 1
        length += right + 1
    return Acceptance(drafts, tuple(accepted))


def acceptance(target: LlamaForCausalLM, drafter: Drafter, stream: Stream) -> Acceptance:
    """Acceptance over prompts from `stream`; `ACCEPTANCE_PLAN` describes them."""
    prompts = windows(stream, LONGEST_PROMPT, PROMPTS, (PROMPT_SEED,)).to(target.device)
    lengths = np.random.default_rng(PROMPT_SEED).integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, size=PROMPTS)
    runs = [accept(target, drafter, row[: int(length)], NEW_TOKENS) for row, length in zip(prompts, lengths, strict=True)]
    by_position = tuple(sum(counts) for counts in zip(*(run.accepted_by_position for run in runs), strict=True))
    return Acceptance(sum(run.drafts for run in runs), by_position)


def evaluate(target: LlamaForCausalLM, drafter: Drafter, stream: Stream, length: int) -> dict[str, Any]:
    """All figures of a pair over the validation stream, for the record of the training."""
    loss, found = validation_loss(target, stream, length), acceptance(target, drafter, stream)
    return {
        "validation_loss_nats_per_token": round(loss, 4),
        "validation_perplexity_per_token": round(math.exp(loss), 3),
        "acceptance_length": round(found.length, 3),
        "acceptance_rate_by_position": [round(count / max(1, found.drafts), 4) for count in found.accepted_by_position],
        "acceptance_setting": f"greedy, drafts of {DRAFT_LENGTH}, {ACCEPTANCE_PLAN}",
    }
