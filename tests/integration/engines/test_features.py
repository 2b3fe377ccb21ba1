"""LoRA and prefix cache under remote drafting, against the engine without it.  (Preemption: `tests/lossless/test_early.py`.)"""

import shutil
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from tests.support.draws import accepted
from tests.support.lora import write_adapter
from tests.support.processes import Verifier, generate_on

pytestmark = pytest.mark.engine

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[7 + (11 * i + j) % 900 for j in range(20 + 9 * i)] for i in range(4)]


def test_an_adapter_whose_directory_is_gone_ends_no_engine(engines: dict[str, Verifier], directory: Path) -> None:
    first, second = (LoRARequest(f"a{n}", n, str(write_adapter(directory / f"a{n}", seed=n))) for n in (2, 3))
    wanted = engines["off"].client.generate(PROMPTS[:2], GREEDY, lora_request=first)
    client = engines["auto"].client
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


def test_prefix_cache_hits_leave_no_wrong_state(engines: dict[str, Verifier]) -> None:
    prompt = [13 + (3 * j) % 800 for j in range(300)]
    clients = [engines[mode].client for mode in ("off", "auto")]
    before = clients[1].fresh_stats()
    for each in (prompt, prompt, [*prompt[:200], 9, 8, 7]):
        _, drafted = accepted(engines["auto"])
        ((wanted,), (got,)) = generate_on(clients, [each], GREEDY)
        assert got.tokens == wanted.tokens
        assert accepted(engines["auto"])[1] > drafted
    after = clients[1].fresh_stats()
    assert after.prompt_tokens - before.prompt_tokens == 300 + 300 + 203
    assert after.cached_tokens - before.cached_tokens > 256
