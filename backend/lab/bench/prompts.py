"""Makes prompts of source code from Python's standard library.  Parent process.

A prompt depends only on its seed, so every configuration gets the same prompts.  No two measurements share a prompt, so that
nothing is answered from a prefix cache.
"""

import random
from typing import Any

from backend.rollout.corpus import load_corpus

MOST_CHARACTERS_PER_TOKEN = 16
LONGEST_SOURCE = 40_000
"""Characters of one file that are used at most; tokenizing more would only cost time."""


class Prompts:
    """Makes prompts as token ids of one tokenizer, of exactly `length` tokens."""

    def __init__(self, target_dir: str, length: int) -> None:
        # Imported here, because it takes seconds and only measuring needs it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
        self._length = length
        self._sources = [document.text[:LONGEST_SOURCE] for document in load_corpus().validation if len(document.text) > 1000]

    def make(self, seed: str) -> list[int]:
        """Code from random lines in the first three quarters of files that the demo models were not trained on."""
        # A string as seed gives the same numbers in every process; `hash` of a string does not.
        chance = random.Random(f"code/{seed}")
        begin = self._tokenizer.bos_token_id
        ids = [] if begin is None else [int(begin)]
        while len(ids) < self._length:
            lines = chance.choice(self._sources).splitlines(keepends=True)
            text = "".join(lines[chance.randrange(max(len(lines) * 3 // 4, 1)) :])
            ids += self._tokenizer(text[: self._length * MOST_CHARACTERS_PER_TOKEN], add_special_tokens=False)["input_ids"]
        return ids[: self._length]
