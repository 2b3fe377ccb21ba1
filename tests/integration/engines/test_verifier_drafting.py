"""A real vLLM verifier against a drafter that speaks garbage, or nothing: output never changes."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams

from backend.wire.drafting import Draft, Drafts, encode
from tests.support.processes import Verifier
from tests.support.scripted_drafter import ScriptedDrafter

pytestmark = pytest.mark.engine

PROMPTS = [[5 + (7 * i + j) % 900 for j in range(8 + 5 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
WRONG_TOKENS: list[list[int]] = [[-1, -1], [10**6], [2**40], [0] * 200, []]


def test_garbage_and_silence_change_nothing(directory: Path, plain: Verifier) -> None:
    """Messages that cannot be read, silence, drafts for another length, and drafts of tokens that cannot be, by turns."""
    expected = [answer.tokens for answer in plain.client.generate(PROMPTS, GREEDY)]

    def wrong(message: Drafts, tokens: list[int], shift: int = 0) -> bytes:
        return encode(Drafts(1, 1, [Draft(i.request_id, i.base_len + shift, tokens) for i in message.items]))

    kinds: Iterator[Callable[[Drafts], bytes | None]] = itertools.cycle(
        [
            *(lambda message, sent=sent: sent for sent in (b"\x00garbage", b"", b'{"type": "drafts"}', None)),
            functools.partial(wrong, tokens=[3, 4], shift=1),
            *(functools.partial(wrong, tokens=tokens) for tokens in WRONG_TOKENS),
        ]
    )
    limits = {"max_num_seqs": 8, "engine_args": {"max_num_batched_tokens": 64}}
    settings = {"mode": "sync", "num_speculative_tokens": 4, "verifier": limits}
    address = f"ipc://{directory}/d{os.urandom(3).hex()}.sock"
    with (
        Verifier(directory, settings, deadline_s=0.3) as verifier,
        ScriptedDrafter(address, lambda tokens, k: [3] * k) as drafter,
    ):
        verifier.set_drafters(drafter.ref)
        verifier.client.run_until(lambda: drafter.is_listened_to)
        while not drafter.answers:
            # The first rounds of all may take long on a busy machine.
            verifier.client.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        drafter.raw = lambda message: next(kinds)(message)
        for _ in range(2):
            assert [answer.tokens for answer in verifier.client.generate(PROMPTS, GREEDY)] == expected
        dropped = verifier.client.fresh_stats().drafters["drafter-0"].dropped
        drafter.raw = lambda message: None
        assert [answer.tokens for answer in verifier.client.generate(PROMPTS, GREEDY)] == expected
        assert verifier.client.fresh_stats().drafters_down == ["drafter-0"], "it is not waited for any more"
    assert min(dropped["stale"], dropped["invalid"]) > 0
