"""A real vLLM verifier against drafters that are perfect, wrong, slow, silent, or speak garbage: output never changes."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams

from backend.wire.drafting import Close, Draft, Drafts, encode
from tests.support.processes import Verifier
from tests.support.scripted_drafter import ScriptedDrafter

pytestmark = pytest.mark.engine

K = 4
PROMPTS = [[5 + (7 * i + j) % 900 for j in range(8 + 5 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def remote(directory: Path) -> Iterator[Verifier]:
    """An engine that is drafted for."""
    settings = {
        "mode": "sync",
        "num_speculative_tokens": K,
        "verifier": {"max_num_seqs": 8, "engine_args": {"max_num_batched_tokens": 64}},
    }
    with Verifier(directory, settings, deadline_s=0.3) as started:
        yield started


@pytest.fixture(scope="module")
def expected(plain: Verifier) -> list[list[int]]:
    return [answer.tokens for answer in plain.client.generate(PROMPTS, GREEDY)]


@pytest.fixture
def drafter(directory: Path, remote: Verifier, expected: list[list[int]]) -> Iterator[ScriptedDrafter]:
    """Knows the whole answer of each prompt."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]

    def oracle(tokens: list[int], k: int) -> list[int]:
        known = (text for text in texts if text[: len(tokens)] == tokens)
        return next(known, [*tokens, *[1] * k])[len(tokens) : len(tokens) + k]

    with ScriptedDrafter(f"ipc://{directory}/d{os.urandom(3).hex()}.sock", oracle) as drafter:
        remote.set_drafters(drafter.ref)
        remote.client.run_until(lambda: drafter.is_listened_to)
        while not drafter.answers:
            # The first rounds of all may take long on a busy machine.
            remote.client.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        drafter.rounds.clear()
        yield drafter
        remote.set_drafters()


def test_features_cover_every_position_once(remote: Verifier, drafter: ScriptedDrafter, expected: list[list[int]]) -> None:
    """Rows leave in order, without gaps, two chunks of prefill included."""
    prompt = [11 + j % 500 for j in range(150)]
    (answer,) = remote.client.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert len(answer.tokens) == 12
    next_row = 0
    items = [item for message in drafter.rounds for item in message.items if not isinstance(item, Close)]
    for item in items:
        # The last rows of the request before may come late.
        if item.request_id == items[-1].request_id:
            assert item.base_len - 1 - item.rows == next_row
            next_row = item.base_len - 1
    # Rows of the last step, which may bring K + 1 tokens, are of no use to anybody.
    assert next_row >= len(prompt) + 12 - 1 - (K + 1)


def test_drafter_that_never_answers_is_not_waited_for_for_long(
    remote: Verifier, drafter: ScriptedDrafter, expected: list[list[int]]
) -> None:
    drafter.raw = lambda message: None
    before = remote.client.fresh_stats()
    assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected
    after = remote.client.fresh_stats()
    assert after.drafters_down == ["drafter-0"]
    assert after.idle_s["awaiting_draft"] > before.idle_s["awaiting_draft"]
    drafter.raw = None
    # An answer in time closes the breaker; on a busy machine it may come late.
    while remote.client.fresh_stats().drafters_down:
        assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected


WRONG_TOKENS: list[list[int]] = [[-1, -1], [10**6], [2**40], [0] * 200, []]


def test_garbage_changes_nothing(remote: Verifier, drafter: ScriptedDrafter, expected: list[list[int]]) -> None:
    """Messages that cannot be read, silence, drafts for another length, and drafts of tokens that cannot be, by turns."""

    def wrong(message: Drafts, tokens: list[int], shift: int = 0) -> bytes:
        return encode(Drafts(1, 1, [Draft(i.request_id, i.base_len + shift, tokens) for i in message.items]))

    kinds: Iterator[Callable[[Drafts], bytes | None]] = itertools.cycle(
        [
            *(lambda message, sent=sent: sent for sent in (b"\x00garbage", b"", b'{"type": "drafts"}', None)),
            functools.partial(wrong, tokens=[3, 4], shift=1),
            *(functools.partial(wrong, tokens=tokens) for tokens in WRONG_TOKENS),
        ]
    )
    drafter.raw = lambda message: next(kinds)(message)
    for _ in range(2):
        assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected
    dropped = remote.client.fresh_stats().drafters["drafter-0"].dropped
    assert min(dropped["stale"], dropped["invalid"]) > 0
