"""Builds vLLM's engine core for a verifier, and warms it up.  Engine process, engine thread, before the loop.

vLLM's source stays unchanged: a mode is a speculative configuration, a scheduler class and a worker class.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from backend.config import REMOTE_MODES, Settings, environment
from backend.engine.arguments import EngineSetupError, common_arguments, other_arguments, remote_speculation
from backend.engine.client import engine_request
from backend.engine.early import EarlySteps, can_be_early
from backend.engine.grammar_repairs import repair_guidance
from backend.engine.resume import add_request
from backend.engine.scheduler import DraftingScheduler
from backend.engine.worker.tensor_transfer import NAME
from backend.models.head_config import DRAFT_MODEL, DSPARK, load_config
from backend.models.kinds import KINDS
from backend.models.resolve import ResolvedModels
from backend.models.vocabulary import shared_tokens

SUPPORTED_VLLM = ("0.32.", "0.33.")
CPU_KV_CACHE_BYTES = 256 << 20
AHEAD_OUTCOMES = 64
"""Most outcomes drafted ahead per request and step."""
DRAFT_DEADLINE_S = 0.25
"""Longest wait for drafts, whatever the measured round trip suggests."""
RING_BYTES = 64 << 20
"""Shared memory per verifier and drafter on one host, for large features."""
GRAPH_TOKENS, MOST_GRAPH_TOKENS = 512, 1024
"""The largest step that vLLM by itself captures as CUDA graphs: on most GPUs, and on Blackwell in data centers."""
WARM_UP_BATCHES = (1, 4, 16, 64)
WARM_UP_STEPS = 8
WARM_UP_PROMPT = 8
WARM_UP_UNLIKE = 2
"""First steps of each batch that are not measured: the prefill, and the first step of the batch's shape."""


def engine_arguments(settings: Settings, paths: ResolvedModels) -> dict[str, Any]:
    """vLLM's engine arguments for these settings, by name."""
    on_cpu = current_platform.is_cpu()
    verifier = settings.verifier
    arguments = common_arguments(settings, paths.target_dir) | {
        "enforce_eager": on_cpu,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES if on_cpu else None,
        "tensor_parallel_size": verifier.tensor_parallel,
        "distributed_executor_backend": "mp" if verifier.tensor_parallel > 1 else "uni",
        "speculative_config": _speculative_config(settings, paths),
        "weight_transfer_config": WeightTransferConfig(backend=NAME),
        "worker_cls": f"backend.engine.worker.{'cpu_worker.OutriderCpuWorker' if on_cpu else 'gpu_worker.OutriderGpuWorker'}",
        "additional_config": {"outrider": _worker_options(settings, paths)},
    }
    arguments = merged(arguments, other_arguments(verifier))
    if settings.mode in REMOTE_MODES:
        # vLLM does not schedule asynchronously with drafters like ours; `can_be_early` decides.
        arguments |= {"async_scheduling": False, "scheduler_cls": "backend.engine.scheduler.DraftingScheduler"}
        if not on_cpu:
            arguments |= _captured(arguments, 1 + settings.num_speculative_tokens)
    return arguments


def _captured(arguments: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The argument by which vLLM captures as CUDA graphs steps of `rows` tokens for every request, too, if it would not.

    Sizes that people name stay as they are.
    """
    most = arguments["max_num_seqs"] * rows
    named = {*arguments, *(arguments.get("compilation_config") or ())}
    if named & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        return {}
    if most <= GRAPH_TOKENS or current_platform.is_device_capability_family(100):
        return {}
    # vLLM captures multiples of 16.
    return {"max_cudagraph_capture_size": min(-(-most // 16) * 16, MOST_GRAPH_TOKENS)}


def merged(ours: dict[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the values of `theirs`.  Dictionaries within are merged too, such as `speculative_config`."""

    def value(name: str) -> Any:
        mine, given = ours.get(name), theirs[name]
        return merged(mine, given) if isinstance(mine, dict) and isinstance(given, dict) else given

    return ours | {name: value(name) for name in theirs}


def build_config(settings: Settings, paths: ResolvedModels) -> VllmConfig:
    """vLLM's configuration.

    Raises `EngineSetupError` when vLLM's version is none that our hooks were written for, or cannot serve model and drafter.
    """
    if not vllm.__version__.startswith(SUPPORTED_VLLM):
        known = " or ".join(f"{each}*" for each in SUPPORTED_VLLM)
        raise EngineSetupError(f"vLLM {vllm.__version__} is installed; this release works with {known}")
    is_v1 = settings.mode != "native" or settings.verifier.engine_args.get("async_scheduling") is False
    if is_v1:
        # The hooks are in the V1 runner, whatever the user's environment says; on CUDA vLLM would choose the V2 runner for
        # modes `off` and `native`.  Who switches asynchronous scheduling off may want fixed responses.
        environment.export({"VLLM_USE_V2_MODEL_RUNNER": "0"})
    arguments = engine_arguments(settings, paths)
    if (arguments["speculative_config"] or {}).get("method") == DSPARK and (is_v1 or current_platform.is_cpu()):
        raise EngineSetupError(
            "--mode native: vLLM drafts with DSpark heads only in its V2 runner, which needs a GPU and async scheduling: "
            "give another --mode"
        )
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    if settings.mode in REMOTE_MODES:
        given = settings.verifier.engine_args.get("async_scheduling")
        config.scheduler_config.async_scheduling = can_be_early(config, given)
    if config.model_config.runner_type == "pooling" and settings.mode != "off":
        raise EngineSetupError(
            "the model embeds or scores text, and has nothing to draft: serve it with --mode off --drafters 0"
        )
    _check_hidden_states(config, paths)
    if settings.mode in REMOTE_MODES and config.model_config.has_inner_state and not config.model_config.enforce_eager:
        # vLLM captures their steps with 1 + K tokens per request, or tells prompts from decoding by that number.
        raise EngineSetupError(
            "CUDA graphs of a target with recurrent layers do not fit drafts that differ in length: add "
            """--verifier-engine-args '{"enforce_eager": true}', or take --mode off or native"""
        )
    if settings.mode not in REMOTE_MODES:
        name = "StockAsyncScheduler" if config.scheduler_config.async_scheduling else "StockScheduler"
        config.scheduler_config.scheduler_cls = f"backend.engine.scheduler.{name}"
    return config


def _check_hidden_states(config: VllmConfig, paths: ResolvedModels) -> None:
    """Refuses a head for hidden states that the target's class does not give; vLLM would say so after loading the weights."""
    head_dir = paths.drafter_dir if KINDS[paths.drafter_kind].takes_features else None
    if head_dir is None or not load_config(head_dir, paths.target_dir).uses_aux:
        return
    model = get_model_cls(config.model_config)
    if not supports_eagle3(model):
        raise EngineSetupError(f"vLLM's {model.__name__} gives no hidden states: take an EAGLE-1 head, a draft model or ngram")


def build_core(config: VllmConfig, on_lost_rank: Callable[[], None]) -> EngineCore:
    """vLLM's engine core with weights loaded and KV cache allocated; the caller steps it.

    vLLM calls `on_lost_rank`, on one of its own threads, when the process of a tensor-parallel rank has died.
    """
    repair_guidance()
    core = EngineCore(config, Executor.get_class(config), log_stats=False, executor_fail_callback=on_lost_rank)
    if isinstance(core.scheduler, DraftingScheduler) and core.async_scheduling:
        core.step_fn = EarlySteps(core)
    return core


def _speculative_config(settings: Settings, paths: ResolvedModels) -> dict[str, Any] | None:
    k = settings.num_speculative_tokens
    if settings.mode == "off":
        return None
    if settings.mode == "native":
        if (native := KINDS[paths.drafter_kind].native) is not None:
            return {"num_speculative_tokens": k, **native}
        assert paths.drafter_dir is not None, "`resolve` finds a model for mode native"
        config = load_config(paths.drafter_dir, paths.target_dir)
        model = {"method": config.kind, "model": paths.drafter_dir, "num_speculative_tokens": k}
        if config.kind != DRAFT_MODEL:
            return model
        shared = shared_tokens(config, paths.drafter_dir, paths.target_dir)
        # vLLM refuses vocabularies of two sizes even where tokenizers are the same and only the padding differs.
        differs = config.own_vocab_size != config.vocab_size or (shared is not None and shared.differ)
        return model | {"use_heterogeneous_vocab": differs}
    return remote_speculation(k)


def _worker_options(settings: Settings, paths: ResolvedModels) -> dict[str, Any]:
    """Options that scheduler and worker read from `additional_config`.

    They are part of vLLM's compile-cache key (`aux_layers` must be): what differs between verifiers is not among them.
    """
    remote = settings.mode in REMOTE_MODES
    head_dir = paths.drafter_dir if remote and KINDS[paths.drafter_kind].takes_features else None
    return {
        "remote": remote,
        "mode": settings.mode,
        "head_dir": head_dir,
        "aux_layers": list(load_config(head_dir, paths.target_dir).aux_layers) if head_dir is not None else [],
        "raw_features": paths.learning_dir is not None,
        "one_pass": paths.drafter_kind == "dflash",
        "ahead_outcomes": AHEAD_OUTCOMES,
        "draft_deadline_s": DRAFT_DEADLINE_S,
        "shared_noise": settings.mode != "native",
        "lookup": settings.verifier.lookup,
        "ring_bytes": RING_BYTES,
    }


def warm_up(core: EngineCore) -> None:
    """Runs and measures a few steps before a verifier reports ready: decodes small batches of made-up tokens.

    First steps are slow: kernels are chosen, buffers grow.  The budget of draft tokens depends on measured step times, also of
    steps with drafts: for 16 requests with 64 draft tokens, a line through plain steps is far off.  Nothing stays in the prefix
    cache or the counters.  Does nothing for a model that embeds or scores.
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
        for batch in WARM_UP_BATCHES:
            if batch <= scheduler.max_num_running_reqs:
                _decode(core, batch)
    scheduler.warm_up_drafts = None
    core.reset_prefix_cache()


def _decode(core: EngineCore, batch: int, logprobs: int | None = None) -> None:
    scheduler: Any = core.scheduler
    vocab = core.vllm_config.model_config.get_vocab_size()
    for i in range(batch):
        params = SamplingParams(temperature=0, max_tokens=WARM_UP_STEPS, ignore_eos=True, logprobs=logprobs)
        request = engine_request(f"warm-up-{batch}-{i}", [(i + j) % vocab for j in range(WARM_UP_PROMPT)], params)
        add_request(core, request)
    unlike = WARM_UP_UNLIKE
    began = time.monotonic()
    while scheduler.has_requests() or core.batch_queue:
        outputs, executed = core.step_fn()
        core.post_step(executed)
        if outputs is None:
            continue
        ended, ran = time.monotonic(), executed or bool(outputs)
        if ran and not unlike and logprobs is None:
            scheduler.note_step(ended - began)
        unlike -= ran and unlike > 0
        began = ended
