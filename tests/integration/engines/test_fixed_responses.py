"""Fixed responses on a real vLLM verifier: every kind of mode emits exactly what it is told."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from backend.fleet import VerifierStats
from backend.wire.engine import FIXED_RESPONSE
from tests.support.processes import Verifier

pytestmark = pytest.mark.engine

K = 4
EOS = 1
LENGTHS = (1, 2, 5, 17, 64, 150)
PROMPTS = [[5 + (7 * i + j) % 900 for j in range(6 + 40 * i)] for i in range(len(LENGTHS))]


def response(i: int, length: int) -> list[int]:
    """Partly what an n-gram drafter can guess, partly not; the model's own end mark is in it and ends nothing."""
    return [EOS if j % 11 == 7 else 5 + (j % 9) * (i + 3) + (j // 40) for j in range(length)]


RESPONSES = [response(i, length) for i, length in enumerate(LENGTHS)]


def forced(tokens: list[int], **changes: Any) -> SamplingParams:
    fixed = {FIXED_RESPONSE: tokens}
    return SamplingParams(**({"temperature": 0, "max_tokens": len(tokens), "ignore_eos": True, "extra_args": fixed} | changes))


@pytest.fixture(scope="module")
def native(directory: Path) -> Iterator[Verifier]:
    settings = {"mode": "native", "num_speculative_tokens": K, "verifier": {"engine_args": {"max_num_batched_tokens": 128}}}
    with Verifier(directory, settings) as started:
        yield started


def check(verifier: Verifier, drafts: bool) -> None:
    """All responses at once."""
    before = verifier.client.fresh_stats()
    params = [forced(tokens, temperature=i % 2, seed=i) for i, tokens in enumerate(RESPONSES)]
    answers = verifier.client.generate(PROMPTS, params)
    assert [answer.tokens for answer in answers] == RESPONSES
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert all(len(output.new_token_ids) <= K + 1 for answer in answers for output in answer.outputs)
    stats = verifier.client.fresh_stats()
    mine, earlier = stats.teacher_forced, before.teacher_forced
    assert (mine.draft_tokens > earlier.draft_tokens) == drafts
    assert live_drafts(stats) == live_drafts(before), "no live figure may know of them"
    # Each verification emits what it accepted and one more; the last of a request may have been cut by that one.
    verifications = stats.verifications - before.verifications
    surplus = mine.accepted_tokens - earlier.accepted_tokens + verifications - sum(LENGTHS)
    assert 0 <= surplus <= len(LENGTHS)


def live_drafts(stats: VerifierStats) -> int:
    return sum(each.draft_tokens for each in stats.drafters.values())


def test_every_response_comes_out_as_it_is_given(engines: dict[str, Verifier], native: Verifier) -> None:
    check(engines["off"], drafts=False)
    check(engines["auto"], drafts=True)
    check(native, drafts=True)


def test_a_free_request_among_fixed_ones_is_as_free_and_counted_as_ever(native: Verifier) -> None:
    client = native.client
    free = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    stats = [client.fresh_stats()]
    (alone,) = client.generate(PROMPTS[3:4], free)
    stats.append(client.fresh_stats())
    beside, *_ = client.generate([PROMPTS[3], *PROMPTS], [free, *map(forced, RESPONSES)])
    stats.append(client.fresh_stats())
    assert beside.tokens == alone.tokens
    live = [live_drafts(at) for at in stats]
    assert live[1] - live[0] == live[2] - live[1] > 0
    forced_drafts = [at.teacher_forced.drafts for at in stats]
    assert forced_drafts[0] == forced_drafts[1] < forced_drafts[2]
