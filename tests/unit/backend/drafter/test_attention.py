"""Attention of single rows: the kernel of a CPU against the definition (that of a GPU: `noise/test_kernels.py`)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.attention import attend
from tests.support.attention_cases import attend_one_by_one, attention_case
from tests.support.properties import examples


@examples(40)
@given(
    st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 8, 20, 64]), st.integers(1, 90), st.integers()
)
def test_the_kernel_of_a_cpu_attends_to_what_the_definition_says(
    rows: int, kv_heads: int, group: int, dim: int, longest: int, seed: int
) -> None:
    given = attention_case(rows, kv_heads * group, kv_heads, dim, longest, seed)
    torch.testing.assert_close(attend(*given), attend_one_by_one(*given), rtol=1e-4, atol=1e-5)


def test_scores_far_apart_and_equal_ones() -> None:
    """Weights of 0, and of one part each; no result is spoiled by overflow."""
    queries, cache, reach = attention_case(3, 2, 1, 8, 30, 1)
    for scale in (0.0, 1e3, 1e6):
        found = attend(queries * scale, cache, reach)
        torch.testing.assert_close(found, attend_one_by_one(queries * scale, cache, reach), rtol=1e-4, atol=1e-4)
