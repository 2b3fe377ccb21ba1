"""The gateway's vLLM configuration: equal to a verifier's in everything that requests are checked against.

Used once, while the gateway starts.  Nothing here builds an engine, loads weights or touches an accelerator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from backend.config import Settings
from backend.config.settings import MAX_NUM_BATCHED_TOKENS
from backend.engine.adapters import adapter_arguments
from backend.engine.parsers import reasoning_parser

ENGINE_ONLY = frozenset(
    {
        "additional_config",
        "data_parallel_size",
        "distributed_executor_backend",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_transfer_config",
        "model",
        "pipeline_parallel_size",
        "quantization",
        "scheduler_cls",
        "speculative_config",
        "tensor_parallel_size",
        "worker_cls",
    }
)
"""Engine arguments that are useless or harmful without an engine."""


class NativeDrafts:
    """Placeholder for vLLM's own drafting (mode `native`).  It only tells vLLM that its rejection sampler is in use."""


def build_vllm_config(settings: Settings, model_dir: str) -> VllmConfig:
    """The configuration with which requests are rendered and validated.

    Raises `ValueError` for engine arguments that vLLM does not have.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    verifier = settings.verifier
    extra = verifier.engine_args
    unknown = sorted(extra.keys() - known)
    if unknown:
        raise ValueError(f"verifier.engine_args: vLLM has no argument {unknown[0]!r}")
    arguments: dict[str, Any] = {
        "model": model_dir,
        "max_model_len": verifier.max_model_len,
        "max_num_seqs": verifier.max_num_seqs,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        "reasoning_parser": reasoning_parser(verifier.reasoning_parser, model_dir, settings.gateway.chat_template) or "",
        "speculative_config": _speculation(settings),
        # No engine: keep vLLM from compiling, or measuring memory for a cache, while it checks the configuration.
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 20,
        "async_scheduling": False,
        "disable_log_stats": True,
        # Makes vLLM's serving layer pass trace contexts on; vLLM itself makes no spans here.
        "otlp_traces_endpoint": settings.tracing.endpoint,
        **adapter_arguments(verifier),
    }
    arguments.update({name: value for name, value in extra.items() if name not in ENGINE_ONLY})
    return AsyncEngineArgs(**arguments).create_engine_config()


def _speculation(settings: Settings) -> dict[str, Any] | None:
    if settings.mode != "native":
        # Our own sampler supports all parameters, so nothing must be refused because of speculation.
        return None
    return {
        "method": "custom_class",
        "model": f"{__name__}.{NativeDrafts.__name__}",
        "num_speculative_tokens": settings.num_speculative_tokens,
    }
