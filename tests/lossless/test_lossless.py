"""Speculation changes no output: greedy token ids are the same in every mode, sampled ones have the same distribution."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams

from backend.demo import TARGET_DIR
from tests.support.processes import Drafter, Verifier
from tests.support.statistics import chi_square_tail, two_sample_chi_square

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

K = 4
GREEDY_PROMPTS, GREEDY_TOKENS = 64, 128
SAMPLES, FEWER_SAMPLES, POSITIONS = 20_000, 5_000, 4
TIE_NATS = 1e-3
SIGNIFICANT = 0.01
"""For `sync`, whose draws are all fixed by the requests' seeds: the outcome is the same every time."""
RARE = 0.001
"""For modes in which timing decides which draft is verified, so that every run is a new draw."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l")


@pytest.fixture(scope="module")
def drafter(directory: Path) -> Iterator[Drafter]:
    drafter = Drafter(directory)
    yield drafter
    drafter.close()


def run(directory: Path, mode: str, drafter: Drafter | None = None, worker: str | None = None) -> Verifier:
    """A verifier in `mode`, its drafter (if any) answering."""
    engine_args = {"worker_cls": worker} if worker else {}
    verifier = Verifier(
        directory,
        {"mode": mode, "num_speculative_tokens": K, "verifier": {"draft_deadline_ms": 2000, "engine_args": engine_args}},
    )
    if drafter is not None:
        verifier.set_drafters(drafter.ref)
    return verifier


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[Verifier]:
    verifier = run(directory, "off")
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def remote(directory: Path, drafter: Drafter) -> Iterator[Verifier]:
    verifier = run(directory, "sync", drafter)
    yield verifier
    verifier.close()


def python_prompts() -> list[list[int]]:
    """Openings of 64 modules of the standard library, 24 to 87 tokens long."""
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace")[200:1000] for path in modules[:GREEDY_PROMPTS]]
    return [tokenizer(text).input_ids[: 24 + i] for i, text in enumerate(texts)]


def is_tie(plain: Verifier, prompt: list[int], tokens: list[int]) -> bool:
    """Whether the target's two best next tokens after `prompt + tokens` are within rounding of each other."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True)
    (answer,) = plain.client.generate([prompt + tokens], params)
    best = sorted(answer.outputs[0].new_logprobs.logprobs[0].tolist(), reverse=True)[:2]
    return bool(best[0] - best[1] < TIE_NATS)


def assert_same_greedy_tokens(plain: Verifier, prompts: list[list[int]], a: list[list[int]], b: list[list[int]]) -> None:
    for prompt, mine, theirs in zip(prompts, a, b, strict=True):
        if mine != theirs:
            at = next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y)
            assert is_tie(plain, prompt, mine[:at]), f"token {at} differs and is no numerical tie"


def greedy(verifier: Verifier, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    return [answer.tokens for answer in verifier.client.generate(prompts, params)]


@pytest.fixture(scope="module")
def expected(plain: Verifier) -> list[list[int]]:
    """Greedy tokens of plain decoding."""
    tokens = greedy(plain, python_prompts())
    assert len(tokens) == GREEDY_PROMPTS
    assert {len(each) for each in tokens} == {GREEDY_TOKENS}
    return tokens


def accepted(verifier: Verifier) -> int:
    return sum(drafter.accepted_tokens for drafter in verifier.client.fresh_stats().drafters.values())


def test_greedy_tokens_are_identical_in_sync(plain: Verifier, remote: Verifier, expected: list[list[int]]) -> None:
    before = accepted(remote)
    assert_same_greedy_tokens(plain, python_prompts(), expected, greedy(remote, python_prompts()))
    assert accepted(remote) - before > GREEDY_PROMPTS, "it really speculated"


@pytest.mark.parametrize("mode", ["native", "pipelined", "ahead", "auto"])
def test_every_other_mode_is_lossless(
    directory: Path,
    drafter: Drafter,
    plain: Verifier,
    expected: list[list[int]],
    plain_samples: list[tuple[int, ...]],
    mode: str,
) -> None:
    verifier = run(directory, mode, None if mode == "native" else drafter)
    try:
        assert_same_greedy_tokens(plain, python_prompts(), expected, greedy(verifier, python_prompts()))
        assert accepted(verifier) > 0, "it really speculated"
        found = p_values(plain_samples, samples(verifier, seed=3_000_000, count=FEWER_SAMPLES))
    finally:
        verifier.close()
    print(mode, found)
    assert corrected(found) > RARE, found


def samples(verifier: Verifier, seed: int, count: int = SAMPLES) -> list[tuple[int, ...]]:
    """`count` independent continuations of one prompt at temperature 1, each request with a seed of its own."""
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
    prompt = tokenizer("import os\nimport sys\n\n\ndef main(args):\n    ").input_ids
    drawn: list[tuple[int, ...]] = []
    for start in range(0, count, 500):
        params = [
            SamplingParams(temperature=1.0, max_tokens=POSITIONS, ignore_eos=True, seed=seed + start + i) for i in range(500)
        ]
        drawn += [tuple(answer.tokens) for answer in verifier.client.generate([prompt] * 500, params)]
    return drawn


def corrected(p: dict[str, float]) -> float:
    """The smallest of several p-values, as if it were the only one (Bonferroni)."""
    return min(1.0, min(p.values()) * len(p))


def p_values(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> dict[str, float]:
    """One test per position, and one over the two tokens that the first verification decides together."""
    tests = {f"position {i}": ([s[i] for s in first], [s[i] for s in second]) for i in range(POSITIONS)}
    tests["positions 1-2"] = ([s[1:3] for s in first], [s[1:3] for s in second])
    return {name: two_sample_chi_square(*pair) for name, pair in tests.items()}


@pytest.fixture(scope="module")
def plain_samples(plain: Verifier) -> list[tuple[int, ...]]:
    return samples(plain, seed=1_000_000)


def test_sampled_tokens_have_the_targets_distribution(plain_samples: list[tuple[int, ...]], remote: Verifier) -> None:
    before = remote.client.fresh_stats().drafters["drafter-0"].drafts
    found = p_values(plain_samples, samples(remote, seed=2_000_000))
    drafted = remote.client.fresh_stats().drafters["drafter-0"].drafts - before
    print(found, f"{drafted} drafted verifications")
    assert drafted > SAMPLES
    assert corrected(found) > SIGNIFICANT, found


def test_the_same_test_finds_a_biased_verifier(directory: Path, drafter: Drafter, plain_samples: list[tuple[int, ...]]) -> None:
    biased = run(directory, "sync", drafter, worker="tests.support.biased.BiasedWorker")
    try:
        found = p_values(plain_samples, samples(biased, seed=2_000_000, count=FEWER_SAMPLES))
    finally:
        biased.close()
    print(found)
    assert corrected(found) < RARE / 1000, found


def test_the_chi_square_tail_is_the_tabulated_one() -> None:
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert two_sample_chi_square([1, 2] * 500, [1, 2] * 500) == pytest.approx(1.0)
