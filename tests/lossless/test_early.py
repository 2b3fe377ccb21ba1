"""Plain steps that begin before the outcome of the one before is known change no token, however often drafting takes turns."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from backend.engine.client import Answer, fixed_sampling
from backend.fleet import LOOKUP
from tests.lossless.cases import VARIANTS, assert_same, python_prompts, request, start
from tests.support.processes import Drafter, Verifier

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 260
PHASE = 40
"""Tokens of the request that is furthest, between two changes of the assignment; look-ups rest after 16 steps."""
BATCH = 6
"""Requests of each kind."""
KINDS: dict[str, dict[str, Any]] = {
    "T = 1.0": {"temperature": 1.0},
    "T = 0.0": {"temperature": 0.0, "max_tokens": 60},
    **{name: {"temperature": 1.0} | VARIANTS[name] for name in ("penalties", "schema", "logprobs", "custom processor")},
}
SMALL: dict[str, Any] = {"max_model_len": 512}
EARLY: dict[str, Any] = SMALL | {"async_scheduling": True, "kv_cache_memory_bytes": 6 << 20}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    with start(tmp_path_factory.mktemp("p"), "off", engine_args=SMALL, lookup=False, max_num_seqs=32) as started:
        yield started


@pytest.fixture(scope="module")
def expected(plain: Verifier) -> list[Answer]:
    return plain.client.generate(python_prompts(BATCH) * len(KINDS), everything())


@pytest.fixture(scope="module", params=[False, True], ids=["", "with look-ups"])
def early(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    """Its steps may begin early; its KV cache is too small for all requests."""
    with start(tmp_path_factory.mktemp("e"), "sync", engine_args=EARLY, lookup=request.param, max_num_seqs=32) as started:
        started.looks_up = request.param  # type: ignore[attr-defined]
        yield started


def everything() -> list[SamplingParams]:
    return [request(1000 + i, **{"max_tokens": TOKENS} | fields) for fields in KINDS.values() for i in range(BATCH)]


def test_drafting_by_turns_changes_no_token(plain: Verifier, expected: list[Answer], early: Verifier, drafter: Drafter) -> None:
    """Steps begin early only without a drafter, and there only while no look-up pays."""
    prompts = python_prompts(BATCH) * len(KINDS)
    client, before = early.client, early.client.fresh_stats()
    counts = [early.set_drafters()]
    ids = [client.add(prompt, params) for prompt, params in zip(prompts, everything(), strict=True)]
    left = [client.add(prompt, request(5, temperature=1.0, max_tokens=TOKENS)) for prompt in prompts[:BATCH]]
    for furthest in range(PHASE, TOKENS, PHASE):
        client.run_until(lambda n=furthest: max(len(client.answers[each].tokens) for each in ids) >= n)  # type: ignore[misc]
        counts.append(early.set_drafters(*((drafter.ref,) if len(counts) % 2 else ())))
        client.abort(left.pop())
    client.run_until(lambda: all(client.answers[each].finish_reason is not None for each in ids))
    for n, name in enumerate(KINDS):
        mine = slice(n * BATCH, (n + 1) * BATCH)
        assert_same(plain, name, expected[mine], [client.answers[each] for each in ids[mine]])
    after = client.fresh_stats()
    accepted = {name: drafted.accepted_tokens for name, drafted in after.drafters.items()}
    begun = [later - sooner for sooner, later in pairwise(counts)]
    print(f"steps that began early {begun}, preemptions {after.preemptions}, accepted {accepted}")
    assert after.preemptions > before.preemptions
    assert max(begun[1::2]) <= 1, "while drafters are asked"
    if early.looks_up:  # type: ignore[attr-defined]
        assert sum(begun) > 0
        assert accepted[LOOKUP] > 0
        assert accepted["drafter-0"] > 0
    else:
        assert accepted["drafter-0"] > TOKENS
        assert min(begun[::2]) > PHASE / 3


def test_fixed_and_resumed_responses_go_on_among_early_steps(plain: Verifier, early: Verifier) -> None:
    prompts = python_prompts(BATCH)
    params = [request(1000 + i, temperature=1.0, max_tokens=TOKENS) for i in range(BATCH)]
    expected = [answer.tokens for answer in plain.client.generate(prompts, params)]
    client, begun = early.client, early.set_drafters()
    ids = [client.add(p, q) for p, q in zip(prompts[:-1], params[:-1], strict=True)]
    client.run_until(lambda: len(client.answers[ids[0]].tokens) >= PHASE)
    among = early.set_drafters()
    assert among > begun or early.looks_up  # type: ignore[attr-defined]
    fixed = client.add(prompts[0], fixed_sampling(expected[1][:PHASE], 1.0))
    client.run_until(lambda: client.answers[fixed].finish_reason is not None)
    assert client.answers[fixed].tokens == expected[1][:PHASE]
    resumed = client.add(prompts[-1], params[-1], emitted=expected[-1][:PHASE])
    client.run_until(lambda: all(client.answers[each].finish_reason is not None for each in (*ids, resumed)))
    assert [client.answers[each].tokens for each in ids] == expected[:-1]
    assert client.answers[resumed].tokens == expected[-1][PHASE:]
