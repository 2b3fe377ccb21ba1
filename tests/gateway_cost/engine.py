"""A verifier that emits ready-made tokens: one per sequence and step, all sequences of a client in one message."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from backend.wire import engine as wire
from tests.support.fake_verifier import FakeVerifier, Sequence, tokenizer

WORDS = 256
"""So many different tokens there are: a token's text tells which of the last steps emitted it."""


class PacedVerifier(FakeVerifier):
    """Makes a step every `interval_s`; a sequence of one token has it at once."""

    def __init__(self, folder: Path, name: str, interval_s: float) -> None:
        super().__init__(folder, name, max_model_len=4096)
        vocabulary = tokenizer().get_vocab()
        self._words = sorted((text, token) for text, token in vocabulary.items() if text.isascii() and text.isalpha())[:WORDS]
        self.emitted_at: dict[bytes, float] = {}
        """By a token's text: when it was emitted last, in monotonic seconds."""
        self._left: dict[Sequence, int] = {}
        self._interval_s = interval_s
        self.behaviour = self._begin

    def start(self) -> PacedVerifier:
        super().start()
        self._spawn(self._run())
        return self

    async def _begin(self, _: FakeVerifier, sequence: Sequence) -> None:
        if sequence.max_tokens > 1:
            self._left[sequence] = sequence.max_tokens
        else:
            sequence.emit([self._words[0][1]], FinishReason.LENGTH)
            self.sequences.remove(sequence)

    async def _run(self) -> None:
        encoder, step, due = MsgpackEncoder(), 0, time.monotonic()
        while True:
            due = max(due + self._interval_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            step += 1
            text, token = self._words[step % WORDS]
            self.emitted_at[text.encode()] = time.monotonic()
            outputs: dict[bytes, list[EngineCoreOutput]] = defaultdict(list)
            for each, left in self._left.items():
                end = FinishReason.LENGTH if left == 1 else None
                outputs[each.client].append(EngineCoreOutput(each.request_id, [token], finish_reason=end))
            for client, its_outputs in outputs.items():
                self.send(client, wire.OUTPUTS, *encoder.encode(EngineCoreOutputs(outputs=its_outputs)))
            self._left = {each: left - 1 for each, left in self._left.items() if left > 1 and not each.aborted.is_set()}
