"""The shared noise: its words, its ends, and that the tokens chosen by it are samples."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backend import noise
from backend.noise import cpu
from tests.support.properties import examples
from tests.support.statistics import chi_square
from tests.support.true_noise import philox, true_gumbel, true_noise

CHANCE_OF_FALSE_ALARM = 1e-4
SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))


def seeds_of(values: list[int]) -> Tensor:
    return torch.tensor([noise.to_int64(value) for value in values], dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_reference_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    assert philox(counter, key) == [int(word, 16) for word in words.split()]


@given(
    st.lists(st.tuples(SEEDS, st.integers(0, 2**32 - 1)), min_size=1, max_size=4),
    st.sampled_from([0, 1]),
    st.lists(st.integers(0, 300_000) | st.integers(0, 2**34 - 1), min_size=1, max_size=9),
)
def test_noise_is_that_of_the_definition(rows: list[tuple[int, int]], domain: int, tokens: list[int]) -> None:
    found = noise.gumbel(
        seeds_of([seed for seed, _ in rows]),
        torch.tensor([position + (domain << 32) for _, position in rows]),
        torch.tensor([tokens] * len(rows)),
    )
    expected = [
        [true_noise(philox((token >> 2, position, domain, 0), (seed % 2**32, seed >> 32))[token & 3]) for token in tokens]
        for seed, position in rows
    ]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64).float(), rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("word", [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 3, 2**32 - 2, 2**32 - 1])
def test_noise_is_finite_and_exact_at_both_ends(word: int) -> None:
    found = float(cpu.noise_of(np.uint32(word)))
    assert math.isfinite(found)
    assert found == pytest.approx(true_noise(word), rel=1e-7)
    assert found <= cpu.MOST_NOISE


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.floats(0.125, 3.0, width=32))
def test_no_noise_exceeds_its_bound(words: list[int], scale: float) -> None:
    ends = [0, 1, 2**31, 2**32 - 2, 2**32 - 1]
    every = np.array(words + ends, np.uint32)
    logits, bounds = np.zeros(len(every), np.float32), np.zeros(len(every), np.float32)
    cpu.fill_bounds(logits, np.float32(1), np.float32(scale), every, bounds, np.float32(0))
    for word, bound in zip(every, bounds, strict=True):
        # The largest gap of all: U close to 0, where 1 - U bounds -log U badly.
        assert bound >= np.float32(scale) * np.float32(true_noise(int(word)))


def expected_choice(
    logits: np.ndarray, seed: int, position: int, beta: float, scale: float, ids: list[int]
) -> tuple[int, float, float]:
    scores = [float(np.float32(logit) * np.float32(beta)) for logit in logits]
    if scale:
        scores = [score + scale * true_gumbel(seed, position, token) for score, token in zip(scores, ids, strict=True)]
    best = scores.index(max(scores))
    rest = scores[:best] + scores[best + 1 :]
    return best, scores[best], scores[best] - max(rest, default=-math.inf) if scores[best] > -math.inf else 0.0


@examples(60)
@given(st.data(), st.integers(1, 700), st.integers(1, 4), st.booleans())
def test_the_choice_is_that_of_the_definition(data: st.DataObject, size: int, rows: int, own_ids: bool) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    logits = (random.standard_normal((rows, size)) * spread).astype(np.float32)
    logits[random.random((rows, size)) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    seeds = [data.draw(SEEDS) for _ in range(rows)]
    positions = random.integers(0, 100_000, rows)
    betas = random.uniform(0.3, 2.0, rows).astype(np.float32)
    scales = np.where(random.random(rows) < 0.3, 0.0, random.uniform(0.5, 1.5, rows)).astype(np.float32)
    ids = random.permutation(4 * size)[:size] if own_ids else np.arange(size)
    if data.draw(st.booleans()):
        ids = np.sort(ids)
    chosen = noise.choose(
        torch.from_numpy(logits),
        seeds_of(seeds),
        torch.from_numpy(positions),
        torch.from_numpy(betas),
        torch.from_numpy(scales),
        torch.from_numpy(ids) if own_ids else None,
    )
    for row in range(rows):
        column, score, lead = expected_choice(
            logits[row], seeds[row], int(positions[row]), float(betas[row]), float(scales[row]), [int(i) for i in ids]
        )
        close = lead < 1e-5 * max(1.0, abs(score))
        assert close or int(chosen.columns[row]) == column
        assert float(chosen.scores[row]) == pytest.approx(score, rel=1e-5, abs=1e-5)
        assert float(chosen.leads[row]) == pytest.approx(lead, rel=1e-4, abs=1e-4 * max(1.0, abs(score)))


@examples(60)
@given(st.data(), st.integers(1, 900), st.integers(1, 20))
def test_the_ranking_is_that_of_all_scores(data: st.DataObject, size: int, count: int) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(3, size, generator=generator) * data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    logits[torch.rand(3, size, generator=generator) < data.draw(st.sampled_from([0.0, 0.9]))] = -torch.inf
    seeds, positions = seeds_of([data.draw(SEEDS) for _ in range(3)]), torch.tensor([0, 7, 100_000])
    betas, scales = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([0.0, 1.0, 0.7])
    noises = noise.gumbel(seeds, positions, torch.arange(size).expand(3, -1))
    scores = logits * betas[:, None] + scales[:, None] * noises
    count = min(count, size)
    columns, found = noise.rank(logits, seeds, positions, betas, scales, count)
    expected = scores.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(found, expected.values[:, :count])
    assert columns[0].equal(expected.indices[0, :count])
    torch.testing.assert_close(scores.gather(1, columns), found)
    assert all(len(set(row)) == count for row in columns.tolist())


def choose(logits: Tensor, scale: float = 1.0, seed: int = 7, position: int = 3) -> noise.Chosen:
    rows = len(logits)
    ones = torch.ones(rows)
    return noise.choose(logits, torch.full((rows,), seed), torch.full((rows,), position), ones, scale * ones)


@pytest.mark.parametrize("size", [5, 256, 257, 1024])
def test_of_equal_columns_the_first_wins(size: int) -> None:
    logits = torch.zeros(1, size)
    assert choose(logits, scale=0.0).columns.tolist() == [0]
    logits[0, size - 3 :] = 2.0
    found = choose(logits, scale=0.0)
    assert (found.columns.tolist(), found.scores.tolist(), found.leads.tolist()) == ([size - 3], [2.0], [0.0])
    # One token in two columns has the same noise in both: the first wins, and leads by nothing.
    ids = torch.tensor([9, 5, 9, 5])
    twice = noise.choose(torch.zeros(1, 4), *(torch.zeros(1, dtype=torch.int64),) * 2, *(torch.ones(1),) * 2, ids)
    assert twice.columns.item() in (0, 1)
    assert twice.leads.item() == 0.0


def test_logits_that_are_no_numbers_yield_a_column_all_the_same() -> None:
    for size in (1, 5, 700):
        for scale in (0.0, 1.0):
            assert 0 <= choose(torch.full((1, size), torch.nan), scale).columns.item() < size


def test_rows_that_lie_apart_and_half_precision_are_read_as_they_are() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, 1000, generator=generator) * 3
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), generator=generator)
    positions, betas = torch.arange(6), torch.full((6,), 1.25)
    scales = torch.tensor([1.0, 0.0, 0.7, 1.3, 0.0, 1.0])
    together = noise.choose(logits, seeds, positions, betas, scales, totals=True)
    torch.testing.assert_close(together.totals, (logits * 1.25).logsumexp(1))
    every_other = torch.stack([logits, logits], dim=1).flatten(0, 1)[::2]
    assert noise.choose(every_other, seeds, positions, betas, scales).columns.equal(together.columns)
    assert noise.choose(logits.bfloat16(), seeds, positions, betas, 0 * scales).columns.equal(
        (logits.bfloat16().float() * 1.25).argmax(dim=1)
    )


# Whether the tokens are samples: many draws are compared with their distribution by a chi-square test.  The seeds are fixed, so
# that a test which passes once passes always.

PROBABILITIES = [0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01]
DRAWS = 20_000


def draw(seeds: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
    logits = torch.tensor(PROBABILITIES).log().expand(len(seeds), -1)
    ones = torch.ones(len(seeds))
    return noise.choose(logits, seeds, positions, ones, scale * ones).columns


def test_tokens_are_samples_over_seeds_and_over_positions() -> None:
    many, one = torch.arange(DRAWS), torch.full((DRAWS,), 12345)
    spread = many * 0x9E3779B97F4A7C1  # Seeds that differ in both halves.
    for seeds, positions in ((many, one), (spread, one), (one, many), (one << 40, many)):
        drawn = draw(seeds, positions).tolist()
        assert chi_square(drawn, dict(enumerate(PROBABILITIES))) > CHANCE_OF_FALSE_ALARM


@pytest.mark.parametrize("step", ["position", "seed", "token"])
def test_neighbours_are_independent(step: str) -> None:
    many, one = torch.arange(DRAWS), torch.full((DRAWS,), 99)
    if step == "token":
        # Neighbours of one counter and of two: each of eight tokens is as likely to exceed the next as not.
        rows = noise.gumbel(many, one, torch.arange(9).expand(DRAWS, -1))
        above = (rows[:, :-1] > rows[:, 1:]).double().sum(dim=0)
        quarter_sigmas = ((above - DRAWS / 2) / math.sqrt(DRAWS / 4)).abs()
        assert float(quarter_sigmas.max()) < 4.5
        exceedances = (rows > rows.median()).double() - 0.5
        correlations = exceedances.T @ exceedances / DRAWS * 4 - torch.eye(9).double()
        assert float(correlations.abs().max()) < 4.5 / math.sqrt(DRAWS)
        return
    first = draw(many, one) if step == "seed" else draw(one, many)
    second = draw(many + 1, one) if step == "seed" else draw(one, many + 1)
    # Every other pair shares no draw with the next.
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))[::2]
    product = {(i, j): p * q for i, p in enumerate(PROBABILITIES) for j, q in enumerate(PROBABILITIES)}
    assert chi_square(pairs, product) > CHANCE_OF_FALSE_ALARM


def test_compiles_where_nothing_can_be_kept(tmp_path: Path) -> None:
    """A package and a home that cannot be written."""
    script = (
        "import numba.core.caching as caching\n"
        "caching._CacheLocator.ensure_cache_path = lambda self: (_ for _ in ()).throw(OSError('read-only'))\n"
        "import torch\nfrom backend import noise\n"
        "ids = torch.arange(2)\nnoise.gumbel(ids, ids, ids.unsqueeze(1))\nprint('warm')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "warm", done.stderr[-2000:]
