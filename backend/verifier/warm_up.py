"""A few steps before a verifier says that it is ready.  Engine thread, before the loop.

First steps are slow (kernels are chosen, buffers grow), and the planner wants to know what steps of different sizes cost.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

BATCHES = (1, 4, 16, 64)
STEPS = 8
PROMPT = 8


def warm_up(core: EngineCore) -> None:
    """Decodes small batches of made-up tokens; nothing of them stays in the prefix cache or the counters."""
    scheduler: Any = core.scheduler
    vocab = core.vllm_config.model_config.get_vocab_size()
    for batch in BATCHES:
        if batch > scheduler.max_num_running_reqs:
            break
        for i in range(batch):
            request = _request(f"warm-up-{batch}-{i}", [(i + j) % vocab for j in range(PROMPT)])
            core.add_request(*core.preprocess_add_request(request))
        while scheduler.has_requests():
            began = time.monotonic()
            _, executed = core.step_fn()
            core.post_step(executed)
            if executed:
                scheduler.note_step(time.monotonic() - began, None)
    core.reset_prefix_cache()
    scheduler.take_verify_s()


def _request(request_id: str, prompt: list[int]) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
