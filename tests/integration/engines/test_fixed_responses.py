"""Fixed responses on a real vLLM verifier: every mode emits exactly what it is told, and accepts only what agrees."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from backend.fleet import VerifierStats
from backend.wire.engine import FIXED_RESPONSE
from tests.support.processes import Verifier, together
from tests.support.scripted_drafter import ScriptedDrafter

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


def start(directory: Path, mode: str) -> Verifier:
    # Without look-ups of its own a verifier drafts what the drafter says and nothing else: the arithmetic is exact.
    engine = {"engine_args": {"max_num_batched_tokens": 128}, "lookup": mode != "sync"}
    return Verifier(directory, {"mode": mode, "num_speculative_tokens": K, "verifier": engine})


@pytest.fixture(scope="module")
def drafting(directory: Path) -> Iterator[dict[str, Verifier]]:
    """A verifier of each mode that drafts."""
    with together(partial(start, directory, "native"), partial(start, directory, "sync")) as (native, sync):
        yield {"native": native, "sync": sync}


@pytest.fixture
def sync(drafting: dict[str, Verifier]) -> Verifier:
    return drafting["sync"]


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


def test_without_remote_drafters(plain: Verifier, drafting: dict[str, Verifier]) -> None:
    check(plain, drafts=False)
    check(drafting["native"], drafts=True)


def test_a_free_request_among_fixed_ones_is_as_free_and_counted_as_ever(drafting: dict[str, Verifier]) -> None:
    client = drafting["native"].client
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


@pytest.mark.parametrize("wrong_from", [0, 2, K])
def test_drafts_are_accepted_exactly_as_far_as_they_agree(directory: Path, sync: Verifier, wrong_from: int) -> None:
    """A drafter that knows the response up to `wrong_from` tokens ahead: arithmetic to the token."""
    prompt, told = PROMPTS[2], response(2, 61)
    text = prompt + told

    def script(tokens: list[int], k: int) -> list[int]:
        right = text[len(tokens) : len(tokens) + k]
        return [t if i < wrong_from else (t + 1) % 900 for i, t in enumerate(right)]

    with ScriptedDrafter(f"ipc://{directory}/s{os.urandom(3).hex()}.sock", script, f"drafter-{wrong_from}") as scripted:
        sync.set_drafters(scripted.ref)
        sync.client.run_until(lambda: scripted.is_listened_to)
        before = sync.client.fresh_stats()
        (answer,) = sync.client.generate([prompt], forced(told))
        after = sync.client.fresh_stats()
        sync.set_drafters()
    assert answer.tokens == told
    drafts = after.teacher_forced.drafts - before.teacher_forced.drafts
    accepted = after.teacher_forced.accepted_tokens - before.teacher_forced.accepted_tokens
    accepted_at = after.teacher_forced.accepted_by_position
    emitted = [len(output.new_token_ids) for output in answer.outputs]
    assert max(emitted) <= wrong_from + 1, "no step emits more than agreed"
    assert sum(accepted_at[wrong_from:]) == sum(before.teacher_forced.accepted_by_position[wrong_from:]), "nothing else is"
    # How many of them a step verifies depends on what steps take here.  Of a draft that comes too late, on a busy machine, what
    # is still ahead is verified later, and there it is wrong sooner.
    right = [sum(each.teacher_forced.drafted_by_position[:wrong_from]) for each in (before, after)]
    assert accepted >= 0.6 * (right[1] - right[0]), "most that agrees is accepted"
    assert sum(emitted) - len(emitted) <= accepted <= drafts * wrong_from
    # Those that are always wrong are only verified where that costs nothing.
    assert drafts * (wrong_from + 1) >= (30 if wrong_from else 1), "most steps were drafted"


def test_unfit_requests_end_with_an_error_and_the_others_go_on(sync: Verifier) -> None:
    client = sync.client
    good = client.add(PROMPTS[0], forced(RESPONSES[3]))
    bad = client.add(PROMPTS[0], forced([10**6]))
    client.finish_all()
    assert client.answers.pop(bad).finish_reason == "error"
    assert client.answers.pop(good).tokens == RESPONSES[3]
