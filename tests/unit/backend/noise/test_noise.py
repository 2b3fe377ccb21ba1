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
from tests.support.true_noise import philox, true_noise

CHANCE_OF_FALSE_ALARM = 1e-4
SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1]))


def seeds_of(values: list[int]) -> Tensor:
    return torch.tensor([noise.to_int64(value) for value in values], dtype=torch.int64)


def test_the_reference_gives_the_published_answer() -> None:
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(counter, key) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


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


@given(st.lists(st.integers(0, 2**32 - 1), max_size=200), st.floats(0.125, 3.0, width=32))
def test_noise_is_finite_exact_and_below_its_bound(words: list[int], scale: float) -> None:
    ends = [0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 3, 2**32 - 2, 2**32 - 1]
    every = np.array(words + ends, np.uint32)
    logits, bounds = np.zeros(len(every), np.float32), np.zeros(len(every), np.float32)
    cpu.fill_bounds(logits, np.float32(1), np.float32(scale), every, bounds, np.float32(0))
    for word, bound in zip(every, bounds, strict=True):
        found, true = float(cpu.noise_of(word)), true_noise(int(word))
        assert found == pytest.approx(true, rel=1e-7)
        assert found <= cpu.MOST_NOISE
        # The largest gap of all: U close to 0, where 1 - U bounds -log U badly.
        assert bound >= np.float32(scale) * np.float32(true)


@examples(120)
@given(st.data(), st.integers(1, 900), st.integers(1, 4), st.integers(1, 20), st.sampled_from(["own", "sorted", "any"]))
def test_choice_and_ranking_are_those_of_all_scores(data: st.DataObject, size: int, rows: int, count: int, ids: str) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    logits = torch.randn(rows, size, generator=generator) * data.draw(st.sampled_from([0.0, 1.0, 5.0, 40.0]))
    logits[uniform(rows, size) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))] = -torch.inf
    seeds = seeds_of([data.draw(SEEDS) for _ in range(rows)])
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    betas = 0.3 + 1.7 * uniform(rows)
    scales = torch.where(uniform(rows) < 0.3, 0.0, 0.5 + uniform(rows))
    token_ids = torch.randperm(4 * size, generator=generator)[:size] if ids != "own" else torch.arange(size)
    token_ids = token_ids.sort().values if ids == "sorted" else token_ids
    given = logits, seeds, positions, betas, scales
    noises = noise.gumbel(seeds, positions, token_ids.expand(rows, -1))
    scores = logits * betas[:, None] + torch.where(scales[:, None] > 0, scales[:, None] * noises, 0.0)
    best, order = scores.sort(dim=1, descending=True, stable=True)
    count = min(count, size)
    columns, found = noise.rank(*given, count, None if ids == "own" else token_ids)
    torch.testing.assert_close(found, best[:, :count])
    torch.testing.assert_close(scores.gather(1, columns), found)
    assert all(len(set(row)) == count for row in columns.tolist())
    assert columns[scales == 0].equal(order[scales == 0, :count]), "of equal scores, the first column leads"
    chosen = noise.choose(*given, None if ids == "own" else token_ids)
    assert chosen.columns.equal(columns[:, 0])
    torch.testing.assert_close(chosen.scores, best[:, 0])
    leads = best[:, 0] - best[:, 1] if size > 1 else torch.full((rows,), torch.inf)
    torch.testing.assert_close(chosen.leads, leads.where(best[:, 0] > -torch.inf, 0.0), rtol=1e-4, atol=1e-4)


def test_logits_that_are_no_numbers_yield_a_column_all_the_same() -> None:
    none, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    for size in (1, 5, 700):
        for scale in (0.0, 1.0):
            assert 0 <= noise.choose(torch.full((1, size), torch.nan), none, none, one, scale * one).columns.item() < size


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
