"""What draft heads of the demo have in common: the target's layers that they read, and the texts that they learn from.

A head learns from text that the target generated and from source code.  What a step teaches is the head's own: `drafter.py` for
one that drafts token by token, `dflash.py` for one that drafts in one pass.  The loss is that of heads that learn while they
serve (`backend/learning/lesson.py`), at temperature 1.
"""

import logging
import time

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from backend.lab.demo.llama import generate
from backend.lab.demo.options import DrafterOptions
from backend.lab.demo.training import Draw, Stream, windows

LOGGER = logging.getLogger(__name__)
BATCH = 128
"""Rows that are generated together, from prompts of one length at one temperature."""


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """The last three layers of a target with `layers` layers: late features predict the next token best."""
    return (layers - 3, layers - 2, layers - 1)


@torch.no_grad()
def training_texts(target: LlamaForCausalLM, stream: Stream, settings: DrafterOptions, seed: int) -> Draw:
    """Draws from short and long texts: what the target wrote at several temperatures, and source code.

    Prompts are 16 to 128 tokens of `stream`.
    """
    found: dict[int, Tensor] = {}
    torch.manual_seed(seed)
    chance = np.random.default_rng((seed, 1))
    for share, length in ((1.0 - settings.long_share, settings.length), (settings.long_share, settings.long_length)):
        began, written = time.monotonic(), list[Tensor]()
        for temperature, part in settings.mixture:
            left = max(1, int(settings.generated_tokens * share * part / length))
            while left > 0:
                count, prompt = min(BATCH, left), int(chance.integers(16, min(128, length // 2) + 1))
                places = np.random.default_rng((seed, 2, length, len(written)))
                start = windows(stream, prompt, count, places)[:, :-1].to(target.device)
                written.append(generate(target, start, length - prompt, temperature).cpu())
                left -= count
        rows = torch.cat(written)
        LOGGER.info("drafter data: %d rows of %d in %.0f s", *rows.shape, time.monotonic() - began)
        count = max(1, int(len(rows) * settings.source_share))
        found[length] = torch.cat((rows, windows(stream, length, count, np.random.default_rng((seed, 3)))[:, :-1]))
    return lambda length, count, chance: found[length][chance.integers(len(found[length]), size=count)]
