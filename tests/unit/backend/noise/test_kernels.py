"""Kernels for GPUs: interpreted they compute what the definitions say, they compile, and they do so once for all sizes."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

INTERPRETED = """
import torch
try:
    from backend.drafter.attention import cuda as attention
    from backend.noise import cuda
except ImportError as error:
    raise SystemExit(f"SKIP no Triton here: {error}")
from backend import noise
from backend.drafter.attention import Reach
from tests.support.attention_cases import attend_one_by_one, attention_case

generator = torch.Generator().manual_seed(1)
for rows, size, ids in ((3, 1500, False), (4, 1100, True), (2, 1, False)):
    logits = torch.randn(rows, size, generator=generator) * 3
    logits[0, : size // 2] = -torch.inf
    if rows == 4:
        logits[3] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = noise.behind(torch.randint(0, 4096, (rows,), generator=generator), torch.arange(rows))
    betas, scales = torch.rand(rows, generator=generator) + 0.5, torch.tensor([1.0, 0.0, 0.7, 1.0])[:rows]
    token_ids = torch.randperm(9000, generator=generator)[:size].sort().values if ids else None
    on_gpu = cuda.choose(logits, seeds, positions, betas, scales, token_ids, True)
    on_cpu = noise.choose(logits, seeds, positions, betas, scales, token_ids, True)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if rows == 3:
        count = 5
        on_gpu = cuda.rank(logits, seeds, positions, betas, scales, count, token_ids)
        on_cpu = noise.rank(logits, seeds, positions, betas, scales, count, token_ids)
        for one, other in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    tokens = torch.randint(0, 150000, (rows, 30), generator=generator)
    one, other = cuda.gumbel(seeds, positions, tokens), noise.gumbel(seeds, positions, tokens)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
logits = torch.randn(2, 1500, generator=generator).round().clamp(max=0)
zeros, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2)
for logits in (logits, logits - 1, torch.full_like(logits, -torch.inf)):
    on_gpu, on_cpu = (each.rank(logits, zeros, zeros, ones, 0 * ones, 900, None) for each in (cuda, noise))
    assert on_gpu[0].equal(on_cpu[0]) and on_gpu[1].equal(on_cpu[1]), "of equal scores, the first column leads"
logits = torch.zeros(1, 1500)
none = torch.zeros(1, dtype=torch.int64)
assert cuda.choose(logits, none, none, torch.ones(1), torch.zeros(1), None, False)[0].tolist() == [0]

attention.BLOCK = 16
for attention.MOST_SPLITS in (1, 4):
    for seed, (rows, heads, kv_heads, dim, longest) in enumerate([(3, 4, 2, 16, 90), (2, 3, 1, 20, 40), (1, 2, 2, 64, 1)]):
        queries, cache, reach = attention_case(rows, heads, kv_heads, dim, longest, seed)
        # A number that many rows have in common may be stored once.
        one = Reach(*(each[:1].expand(3) for each in reach.columns()))
        for queries, reach in ((queries, reach), (torch.randn(3, heads, dim, generator=generator), one)):
            found = attention.attend(queries, cache, reach, dim**-0.5)
            torch.testing.assert_close(found, attend_one_by_one(queries, cache, reach), rtol=1e-4, atol=1e-5)
print("same")
"""


COMPILED = """
try:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from backend.drafter.attention import cuda as attention
    from backend.noise import cuda
except ImportError as error:
    raise SystemExit(f"SKIP no Triton here: {error}")
types = {"logits": "*fp32", "seeds": "*i64", "positions": "*i64", "betas": "*fp32", "scales": "*fp32", "ids": "*i64"}
types |= {"best": "*fp32", "second": "*fp32", "chosen": "*i64", "tokens": "*i64", "noise": "*fp32", "keys": "*i64"}
types |= {"tops": "*fp32", "sums": "*fp32", "columns": "*i64", "scores": "*fp32", "leads": "*fp32", "totals": "*fp32"}
types |= dict.fromkeys(("places", "starts", "bounds", "tails", "strides"), "*i64")
types |= {"size": "i32", "scale": "fp32", "queries": "*bf16", "cache": "*bf16", "result": "*bf16"}
for kernel, constants in (
    (cuda.choose_kernel, {"HAS_IDS": True, "TOTALS": True, "BLOCK": 1024}),
    (cuda.choose_kernel, {"HAS_IDS": False, "TOTALS": False, "BLOCK": 1024}),
    (cuda.join_kernel, {"TOTALS": True, "BLOCKS": 256}),
    (attention.attend_kernel, {"KV": 8, "GROUP": 4, "DIM": 128, "PADDED": 16, "WIDE": 128, "SPLITS": 8, "BLOCK": 64}),
    (attention.join_kernel, {"DIM": 128, "WIDE": 128, "SPLITS": 8}),
    (cuda.keys_kernel, {"HAS_IDS": True, "BLOCK": 1024}),
    (cuda.gumbel_kernel, {"BLOCK": 1024}),
):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    for capability in 90, 100:
        try:
            made = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
        except RuntimeError as error:
            raise SystemExit(f"SKIP Triton has no compiler for this GPU here: {error}")
        assert made.asm["ptx"]
print("compiled")
"""


@pytest.mark.parametrize(("script", "interprets", "said"), [(INTERPRETED, "1", "same"), (COMPILED, "0", "compiled")])
def test_the_gpu_kernels_interpreted_agree_with_the_definition_and_they_compile(
    script: str, interprets: str, said: str
) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interprets}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    if "SKIP" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.strip() == said, done.stderr[-2000:]


def test_what_was_compiled_at_the_start_serves_all_sizes_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, jit = pytest.importorskip("triton.backends.compiler"), pytest.importorskip("triton.runtime.jit")
    from triton.compiler import make_backend

    from backend.noise import cuda

    target, variants = make_backend(compiler.GPUTarget("cuda", 90, 32)), set()
    for kernel in (cuda.choose_kernel, cuda.join_kernel, cuda.keys_kernel, cuda.gumbel_kernel):
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, target)

        def note(*inputs: Any, grid: Any, warmup: bool, kernel: Any = kernel, bind: Any = bind, **options: Any) -> None:
            variants.add((kernel, str(bind(*inputs, **options)[1])))

        monkeypatch.setattr(kernel, "run", note)

    def ask(rows: int, size: int) -> None:
        # With an odd number of rows, the positions' address is not divisible by 16.
        seeds, positions = torch.zeros(2, rows, dtype=torch.int64)
        asked = torch.zeros(rows, size), seeds, positions, torch.ones(rows), torch.ones(rows)
        cuda.gumbel(seeds, positions, torch.zeros(rows, 1, dtype=torch.int64))
        for ids in (None, torch.arange(size)):
            for totals in (False, True):
                cuda.choose(*asked, ids, totals)
            cuda.rank(*asked, 2, ids)

    ask(2, 2)
    compiled = set(variants)
    assert len(compiled) == 9
    for rows, size in ((1, 151_936), (2, 151_936), (3, 151_936), (3, 32_001)):
        ask(rows, size)
    assert variants == compiled
