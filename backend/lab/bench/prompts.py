"""Makes prompts of four domains from Python's standard library.  Parent process.

A prompt depends only on domain and seed, so every configuration gets the same prompts.  No two measurements share a prompt, so
that nothing is answered from a prefix cache.
"""

import ast
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from backend.rollout.corpus import Document, load_corpus

MOST_CHARACTERS_PER_TOKEN = 16
LONGEST_SOURCE = 40_000
"""Characters of one file that are used at most; parsing and tokenizing more would only cost time."""


class Prompts:
    """Makes prompts as token ids of one tokenizer: exactly `length` tokens, or for chat at most `length`."""

    def __init__(self, target_dir: str, length: int) -> None:
        # Imported here, because it takes seconds and only measuring needs it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(target_dir)
        self._length = length

    def make(self, domain: str, seed: str) -> list[int]:
        """One prompt of a domain (code, prose, chat, random)."""
        # A string as seed gives the same numbers in every process; `hash` of a string does not.
        chance = random.Random(f"{domain}/{seed}")
        if domain == "random":
            return chance.choices(self._ordinary, k=self._length)
        if domain == "chat":
            # A long prompt is cut at its beginning, so that the end of the chat template stays.
            return self._encode(self._text(domain, chance))[-self._length :]
        begin = self._tokenizer.bos_token_id
        ids = [] if begin is None else [int(begin)]
        while len(ids) < self._length:
            ids += self._encode(self._text(domain, chance)[: self._length * MOST_CHARACTERS_PER_TOKEN])
        return ids[: self._length]

    def _text(self, domain: str, chance: random.Random) -> str:
        if domain == "code":
            return _window(chance.choice(self._sources), chance)
        if domain == "prose":
            return chance.choice(self._prose) + "\n\n"
        task = chance.choice(self._prose).split("\n\n")[0]
        content = f"Write a Python function that does this:\n{task}"
        if not getattr(self._tokenizer, "chat_template", None):
            return f"User: {content}\nAssistant:"
        messages = [{"role": "user", "content": content}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def _ordinary(self) -> list[int]:
        special = set(self._tokenizer.all_special_ids)
        return [token for token in range(len(self._tokenizer)) if token not in special]

    @cached_property
    def _sources(self) -> list[str]:
        return [document.text[:LONGEST_SOURCE] for document in load_corpus().validation if len(document.text) > 1000]

    @cached_property
    def _prose(self) -> list[str]:
        return docstrings(load_corpus().validation)


def docstrings(documents: Sequence[Document]) -> list[str]:
    """Every docstring of more than 80 characters, without its indentation."""
    found = []
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            continue  # tests of the standard library contain invalid source on purpose
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    found.append(text)
    return found


def _window(text: str, chance: random.Random) -> str:
    """The text from a random line in its first three quarters on."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[chance.randrange(max(len(lines) * 3 // 4, 1)) :])
