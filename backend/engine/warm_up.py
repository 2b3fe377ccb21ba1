"""Runs and measures a few steps before a verifier reports ready.  Engine thread, before the loop.

First steps are slow: kernels are chosen, buffers grow.  The budget of draft tokens depends on measured step times, also of
steps with drafts: for 16 requests with 64 draft tokens, a line through plain steps is far off.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine.core import EngineCore

from backend.engine.client import engine_request
from backend.engine.scheduler import DraftingScheduler

BATCHES = (1, 4, 16, 64)
STEPS = 8
PROMPT = 8
UNLIKE = 2
"""First steps of each batch that are not measured: the prefill, and the first step of the batch's shape."""


def warm_up(core: EngineCore) -> None:
    """Decodes small batches of made-up tokens; none of them stay in the prefix cache or the counters.

    Does nothing for a model that embeds or scores.
    """
    if core.vllm_config.model_config.runner_type == "pooling":
        return
    scheduler: Any = core.scheduler
    drafting = isinstance(scheduler, DraftingScheduler)
    scheduler.warm_up_drafts = 0
    # vLLM compiles the kernels for log probabilities at their first use.
    _decode(core, 1, logprobs=1)
    for k in {0, scheduler.num_spec_tokens} if drafting else {0}:
        scheduler.warm_up_drafts = k
        for batch in BATCHES:
            if batch <= scheduler.max_num_running_reqs:
                _decode(core, batch)
    scheduler.warm_up_drafts = None
    core.reset_prefix_cache()


def _decode(core: EngineCore, batch: int, logprobs: int | None = None) -> None:
    scheduler: Any = core.scheduler
    vocab = core.vllm_config.model_config.get_vocab_size()
    for i in range(batch):
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=logprobs)
        request = engine_request(f"warm-up-{batch}-{i}", [(i + j) % vocab for j in range(PROMPT)], params)
        core.add_request(*core.preprocess_add_request(request))
    unlike = UNLIKE
    while scheduler.has_requests():
        began = time.monotonic()
        _, executed = core.step_fn()
        core.post_step(executed)
        if executed and not unlike and logprobs is None:
            scheduler.note_step(time.monotonic() - began)
        unlike -= executed and unlike > 0
