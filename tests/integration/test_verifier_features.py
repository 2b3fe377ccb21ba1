"""LoRA, prefix cache and preemption under remote drafting, each against the same engine without it."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.support.draws import accepted
from tests.support.lora import write_adapter
from tests.support.processes import Drafter, Verifier, generate_on, together

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[7 + (11 * i + j) % 900 for j in range(20 + 9 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[tuple[Verifier, Verifier]]:
    """The same engine without and with a remote drafter; small, so that KV runs out."""
    engine_args: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_cpu_loras": 4,
        "block_size": 32,
        "kv_cache_memory_bytes": 3 << 20,
        "max_model_len": 512,
    }
    verifier = {"max_num_seqs": 16, "engine_args": engine_args}
    starts = (partial(Verifier, directory, {"mode": mode, "verifier": verifier}) for mode in ("off", "sync"))
    with together(*starts, partial(Drafter, directory)) as (plain, remote, drafter):
        remote.set_drafters(drafter.ref)
        yield plain, remote


def compare(pair: tuple[Verifier, Verifier], prompts: list[list[int]], params: Any, **fields: Any) -> None:
    """Tokens are the same with and without drafts, and drafts were used."""
    _, before = accepted(pair[1])
    wanted, got = generate_on([each.client for each in pair], prompts, params, **fields)
    assert [g.tokens for g in got] == [w.tokens for w in wanted]
    assert accepted(pair[1])[1] > before


def test_an_adapter_whose_directory_is_gone_ends_no_engine(pair: tuple[Verifier, Verifier], directory: Path) -> None:
    first, second = (LoRARequest(f"a{n}", n, str(write_adapter(directory / f"a{n}", seed=n))) for n in (2, 3))
    wanted = pair[0].client.generate(PROMPTS[:2], GREEDY, lora_request=first)
    client = pair[1].client
    running = [client.add(prompt, GREEDY, lora_request=first) for prompt in PROMPTS[:2]]
    client.run_until(lambda: all(client.answers[each].tokens for each in running))
    shutil.rmtree(first.lora_path)
    others = [
        client.add(PROMPTS[2], GREEDY, lora_request=second),
        client.add(PROMPTS[3], GREEDY, lora_request=LoRARequest("a4", 4, str(directory / "nowhere"))),
    ]
    client.finish_all()
    assert [client.answers[each].tokens for each in running] == [each.tokens for each in wanted]
    assert [client.answers.pop(each).finish_reason for each in (*running, *others)] == ["length", "length", "length", "error"]


def test_prefix_cache_hits_leave_no_wrong_state(pair: tuple[Verifier, Verifier]) -> None:
    prompt = [13 + (3 * j) % 800 for j in range(300)]
    before = pair[1].client.fresh_stats()
    compare(pair, [prompt], GREEDY)
    compare(pair, [prompt], GREEDY)
    compare(pair, [[*prompt[:200], 9, 8, 7]], GREEDY)
    after = pair[1].client.fresh_stats()
    assert after.prompt_tokens - before.prompt_tokens == 300 + 300 + 203
    assert after.cached_tokens - before.cached_tokens > 256


def test_preempted_requests_go_on_as_if_nothing_had_happened(pair: tuple[Verifier, Verifier]) -> None:
    before = pair[1].client.fresh_stats().preemptions
    prompts = [[*p, i] for i, p in enumerate(PROMPTS * 2)]
    params = [SamplingParams(temperature=i % 2, max_tokens=125, ignore_eos=True, seed=3) for i in range(len(prompts))]
    compare(pair, prompts, params)
    assert pair[1].client.fresh_stats().preemptions > before, "KV did run out"
