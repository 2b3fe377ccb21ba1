"""Attention of single rows: the kernel of a CPU against the definition (that of a GPU: `noise/test_kernels.py`)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.attention import attend
from tests.support.attention_cases import attend_one_by_one, attention_case
from tests.support.properties import examples


@examples(40)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 4), st.sampled_from([4, 8, 20, 64]), st.integers(1, 90)),
    st.integers(),
    st.sampled_from([0.0, 1.0, 1e3, 1e6]),
)
def test_the_kernel_of_a_cpu_attends_to_what_the_definition_says(
    sizes: tuple[int, int, int, int, int], seed: int, scale: float
) -> None:
    """Also where scores are equal, or so far apart that they could overflow."""
    rows, kv_heads, group, dim, longest = sizes
    queries, cache, reach = attention_case(rows, kv_heads * group, kv_heads, dim, longest, seed)
    found = attend(queries * scale, cache, reach)
    torch.testing.assert_close(found, attend_one_by_one(queries * scale, cache, reach), rtol=1e-4, atol=1e-5)
