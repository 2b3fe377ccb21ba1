"""A behaviour of fake verifiers: emits a given text in the demo target's tokens, a few at a time.  Tests only."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from tokenizers import Tokenizer
from vllm.v1.engine import FinishReason

from backend.models.demo import TARGET_DIR
from tests.support.fake_verifier import Behaviour, FakeVerifier, Sequence


@cache
def tokenizer() -> Any:
    return Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))


def saying(text: str, finish: FinishReason = FinishReason.STOP, tokens_at_a_time: int = 2) -> Behaviour:
    async def behaviour(verifier: FakeVerifier, sequence: Sequence) -> None:
        tokens = tokenizer().encode(text, add_special_tokens=False).ids
        if finish is FinishReason.STOP:
            # The stop token is emitted too, but is not part of the text.
            tokens.append(tokenizer().token_to_id("<|endoftext|>"))
        for start in range(0, len(tokens), tokens_at_a_time):
            last = start + tokens_at_a_time >= len(tokens)
            sequence.emit(tokens[start : start + tokens_at_a_time], finish if last else None)
            await asyncio.sleep(0)

    return behaviour
