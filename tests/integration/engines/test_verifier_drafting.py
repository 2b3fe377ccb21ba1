"""A real vLLM verifier against drafters that are perfect, wrong, slow, silent, or speak garbage: output never changes."""

import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams

from backend.wire.drafting import Close, Draft, Drafts, Next, encode
from tests.support.processes import Verifier
from tests.support.scripted_drafter import ScriptedDrafter

pytestmark = pytest.mark.engine

K = 4
PROMPTS = [[5 + (7 * i + j) % 900 for j in range(8 + 5 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v")


@pytest.fixture(scope="module")
def remote(directory: Path) -> Iterator[Verifier]:
    """An engine that is drafted for."""
    settings = {
        "mode": "sync",
        "num_speculative_tokens": K,
        "verifier": {"max_num_seqs": 8, "draft_deadline_ms": 300, "engine_args": {"max_num_batched_tokens": 64}},
    }
    with Verifier(directory, settings) as started:
        yield started


@pytest.fixture(scope="module")
def expected(plain: Verifier) -> list[list[int]]:
    return [answer.tokens for answer in plain.client.generate(PROMPTS, GREEDY)]


class Oracle:
    """Knows the whole answer of each prompt."""

    def __init__(self, answers: list[list[int]]) -> None:
        self._texts = [p + a for p, a in zip(PROMPTS, answers, strict=True)]

    def __call__(self, request_id: str, tokens: list[int], k: int) -> list[int] | None:
        for text in self._texts:
            if text[: len(tokens)] == tokens:
                return text[len(tokens) : len(tokens) + k]
        return [1] * k


@pytest.fixture
def drafter(directory: Path, remote: Verifier, expected: list[list[int]]) -> Iterator[ScriptedDrafter]:
    drafter = ScriptedDrafter(f"ipc://{directory}/d{os.urandom(3).hex()}.sock", Oracle(expected))
    remote.set_drafters(drafter.ref)
    remote.client.run_until(lambda: bool(drafter.listeners))
    while not drafter.answers:
        # The first rounds of all may take long on a busy machine.
        remote.client.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    drafter.rounds.clear()
    yield drafter
    remote.set_drafters()
    drafter.close()


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
    drafter.script = lambda request_id, tokens, k: None
    before = remote.client.fresh_stats()
    assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected
    after = remote.client.fresh_stats()
    assert after.drafters_down == ["drafter-0"]
    assert after.idle_s["awaiting_draft"] > before.idle_s["awaiting_draft"]
    drafter.script = Oracle(expected)
    assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected
    stats = remote.client.fresh_stats()
    assert stats.drafters_down == [], "an answer closes the breaker"


WRONG_TOKENS: list[list[int]] = [[-1, -1], [10**6], [2**40], [0] * 200, []]


def test_garbage_changes_nothing(remote: Verifier, drafter: ScriptedDrafter, expected: list[list[int]]) -> None:
    """Messages that cannot be read, silence, drafts for another length, and drafts of tokens that cannot be, by turns."""

    def shifted(message: Next) -> list[bytes]:
        return [encode(Drafts(1, 1, [Draft(i.request_id, i.base_len + 1, [3, 4]) for i in message.items]))]

    def wrong(message: Next, tokens: list[int]) -> list[bytes]:
        return [encode(Drafts(1, 1, [Draft(i.request_id, i.base_len, tokens) for i in message.items]))]

    kinds: Iterator[Callable[[Next], list[bytes] | None]] = itertools.cycle(
        [
            lambda message: [b"\x00garbage"],
            lambda message: [b""],
            lambda message: [json.dumps({"type": "drafts"}).encode()],
            lambda message: None,
            shifted,
            *(functools.partial(wrong, tokens=tokens) for tokens in WRONG_TOKENS),
        ]
    )
    drafter.raw = lambda message: next(kinds)(message)
    for _ in range(2):
        assert [a.tokens for a in remote.client.generate(PROMPTS, GREEDY)] == expected
    dropped = remote.client.fresh_stats().drafters["drafter-0"].dropped
    assert min(dropped["stale"], dropped["invalid"]) > 0
