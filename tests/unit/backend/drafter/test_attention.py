"""Attention of single rows: both kernels against the definition."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.attention import _attend_one_by_one, attend
from tests.support.attention_cases import attention_case
from tests.support.properties import examples


@examples(40)
@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 8, 20, 64]), st.integers(1, 90), st.integers()
)
def test_the_kernel_of_a_cpu_attends_to_what_the_definition_says(
    rows: int, kv_heads: int, group: int, dim: int, longest: int, seed: int
) -> None:
    given = attention_case(rows, kv_heads * group, kv_heads, dim, longest, seed)
    torch.testing.assert_close(attend(*given), _attend_one_by_one(*given), rtol=1e-4, atol=1e-5)


def test_scores_far_apart_and_equal_ones() -> None:
    """Weights of 0, and of one part each; no result is spoiled by overflow."""
    queries, cache, reach = attention_case(3, 2, 1, 8, 30, 1)
    for scale in (0.0, 1e3, 1e6):
        found = attend(queries * scale, cache, reach)
        torch.testing.assert_close(found, _attend_one_by_one(queries * scale, cache, reach), rtol=1e-4, atol=1e-4)


INTERPRETED = """
import torch
try:
    from backend.drafter.attention import cuda
except ImportError as error:
    raise SystemExit(f"SKIP no Triton here: {error}")
from backend.drafter.attention import _attend_one_by_one
from tests.support.attention_cases import attention_case

cuda.BLOCK = 16
for most_splits in (1, 4):
    cuda.MOST_SPLITS = most_splits
    for seed, (rows, heads, kv_heads, dim, longest) in enumerate([(3, 4, 2, 16, 90), (2, 3, 1, 20, 40), (1, 2, 2, 64, 1)]):
        queries, cache, reach = attention_case(rows, heads, kv_heads, dim, longest, seed)
        found = cuda.attend(queries, cache, reach, dim**-0.5)
        torch.testing.assert_close(found, _attend_one_by_one(queries, cache, reach), rtol=1e-4, atol=1e-5)
print("same")
"""


def test_the_gpu_kernels_interpreted_attend_to_what_the_definition_says() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    if done.stderr.startswith("SKIP"):
        pytest.skip(done.stderr.strip())
    assert done.stdout.strip() == "same", done.stderr[-2000:]
