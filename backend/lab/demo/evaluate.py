"""Measures the acceptance length of the demo's EAGLE-3 head.

Acceptance length is tokens per target step in greedy speculative decoding, over all prompts together: 1 + accepted draft
tokens / drafts.  Drafts have `DRAFT_LENGTH` tokens; the last draft of a prompt counts in full.  A draft token is
accepted if it and all before it equal the target's greedy text, so that text alone judges drafts from all places at once.
"""

from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import features, generate
from backend.lab.demo.training import Stream, windows
from backend.learning.head import Drafter
from backend.models.writing import DRAFT_LENGTH

PROMPTS = 64
NEW_TOKENS = 128
PROMPT_SEED = 7
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 200
ACCEPTANCE_PLAN = f"{PROMPTS} validation prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} tokens, {NEW_TOKENS} new tokens each"


@torch.no_grad()
def accepted(target: LlamaForCausalLM, drafter: Drafter, prompt: Tensor, new_tokens: int) -> list[int]:
    """Accepted tokens of each draft, while a prompt `[n]` is decoded greedily until at least `new_tokens` are emitted."""
    text = generate(target, prompt[None], new_tokens + DRAFT_LENGTH)
    rows = text.shape[1] - DRAFT_LENGTH - 1
    _, inputs = features(target, text[:, :rows], drafter.feature_layers)
    outputs = drafter.unroll(text[:, 1:], inputs, DRAFT_LENGTH)
    # Row p drafts the tokens from position p + 2 on.
    hits = [drafter.logits(output).argmax(-1)[0] == text[0, i + 2 : i + 2 + rows] for i, output in enumerate(outputs)]
    kept: list[int] = torch.stack(hits).cumprod(0).sum(0).tolist()
    found = list[int]()
    length = len(prompt) + 1
    while length < len(prompt) + new_tokens:
        found.append(kept[length - 2])
        length += found[-1] + 1
    return found


def evaluate(target: LlamaForCausalLM, drafter: Drafter, stream: Stream) -> dict[str, Any]:
    """Acceptance over prompts from the validation stream, for the record of the training."""
    prompts = windows(stream, LONGEST_PROMPT, PROMPTS, np.random.default_rng(PROMPT_SEED)).to(target.device)
    lengths = np.random.default_rng(PROMPT_SEED).integers(SHORTEST_PROMPT, LONGEST_PROMPT + 1, size=PROMPTS)
    runs = zip(prompts, lengths, strict=True)
    drafts = [each for row, length in runs for each in accepted(target, drafter, row[: int(length)], NEW_TOKENS)]
    return {
        "acceptance_length": round(1 + fmean(drafts), 3),
        "acceptance_rate_by_position": [round(fmean(each > place for each in drafts), 4) for place in range(DRAFT_LENGTH)],
        "acceptance_setting": f"greedy, drafts of {DRAFT_LENGTH}, {ACCEPTANCE_PLAN}",
    }
