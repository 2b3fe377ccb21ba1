"""The gateway's vLLM configuration, equal to a verifier's in everything that requests are checked against, and the sampling
parameters that a client or a rollout may give.

The configuration is made once, while the gateway starts.  Nothing here builds an engine or loads weights.
"""

import msgspec
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from backend.config import Settings, environment
from backend.engine.arguments import common_arguments, other_arguments, remote_speculation

ENGINE_ONLY = {
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
"""Engine arguments that are useless or harmful without an engine."""
INTERNAL = {
    "output_kind",
    "output_text_buffer_length",
    "routed_experts_prompt_start",
    "skip_clone",
    "skip_reading_prefix_cache",
    "trace_decode_token_ids",
}
"""Sampling parameters that vLLM's front half sets, or hands on to what does not run here."""
PARAMETERS = frozenset(field.name for field in msgspec.structs.fields(SamplingParams) if field.name[0] != "_") - INTERNAL
VERIFIERS = "outrider_"
"""So begin the names of the verifier's own `extra_args`; clients give `REQUEST_ID_KEY` alone."""


def build_vllm_config(settings: Settings, model_dir: str) -> VllmConfig:
    """The configuration with which requests are rendered and validated.

    Raises `EngineSetupError` for engine arguments that vLLM does not have.
    """
    if not current_platform.device_type:
        # vLLM's CUDA build where there is no GPU: no engine runs here, but a configuration must name a device.
        type(current_platform).device_type = "cpu"
    # In mode `native`, requests that vLLM's rejection sampler cannot serve must be refused.  Our own sampler serves all.
    speculation = remote_speculation(settings.num_speculative_tokens) if settings.mode == "native" else None
    if settings.mode != "native":
        # The verifiers have the V1 runner.  On CUDA vLLM would choose the V2 runner without speculation, and refuse the V1
        # runner's custom logits processors.
        environment.export({"VLLM_USE_V2_MODEL_RUNNER": "0"})
    arguments = common_arguments(settings, model_dir) | {
        "speculative_config": speculation,
        # No engine: keep vLLM from compiling, or measuring memory for a cache, while it checks the configuration.
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 20,
        "async_scheduling": False,
        "disable_log_stats": True,
        # Makes vLLM's serving layer pass trace contexts on; vLLM itself makes no spans here.
        "otlp_traces_endpoint": settings.tracing.endpoint,
    }
    given = other_arguments(settings.verifier)
    arguments |= {name: value for name, value in given.items() if name not in ENGINE_ONLY}
    return AsyncEngineArgs(**arguments).create_engine_config()
