"""The parts of vLLM that the verifier hooks into still look as they did when the hooks were written."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm  # must be the first of vLLM's modules
from vllm.config import CompilationConfig, VllmConfig
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper.utils import convert_mapping
from vllm.triton_utils.dispatcher import _rebind_kernels
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.request import Request
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.sample.ops import logprobs
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import ExecuteModelState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

import backend.noise  # noqa: F401
from backend.config.settings import MAX_NUM_BATCHED_TOKENS
from backend.engine.build import GRAPH_TOKENS, SUPPORTED_VLLM
from backend.engine.worker.cpu_worker import count_at_least, expand, shrink

LENGTH = "self.uniform_decode_query_len"
PARAMETERS = {
    (Runner, "propose_draft_token_ids"): (
        "scheduler_output sampled_token_ids sampling_metadata hidden_states "
        "sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings"
    ),
    (Runner, "execute_model"): "scheduler_output intermediate_tensors",
    (Runner, "sample_tokens"): "grammar_output",
    (Runner, "_get_prompt_logprobs_dict"): "hidden_states num_scheduled_tokens",
    (Runner, "_set_active_loras"): "prompt_lora_mapping token_lora_mapping lora_requests mapping_type",
    (Runner, "_sample"): "logits spec_decode_metadata",
    (Runner, "_update_states"): "scheduler_output",
    (Runner, "_dummy_sampler_run"): "hidden_states",
    (InputBatch, "add_request"): "request",
    (Request, "append_output_token_ids"): "token_ids",
    (StructuredOutputManager, "_get_constraint_bounds"): "request spec_tokens spec_tokens_committed",
    (XgrammarGrammar, "accept_tokens"): "request_id tokens",
    (EngineCore, "add_request"): "request request_wave",
    (Runner, "_input_fits_in_drafter"): "common_attn_metadata",
    (Runner, "_get_eagle3_aux_layers_from_config"): "",
    (Runner, "take_draft_token_ids"): "",
    (Scheduler, "schedule"): "throttle_prefills",
    (Scheduler, "update_from_output"): "scheduler_output model_runner_output",
    (Scheduler, "add_request"): "request",
    (Scheduler, "finish_requests"): "request_ids finished_status",
    (Scheduler, "update_draft_token_ids"): "draft_token_ids",
    (Scheduler, "_preempt_request"): "request timestamp drop_stale_output",
    (Scheduler, "_free_request"): "request delay_free_blocks",
    (Scheduler, "get_request_counts"): "",
    (Scheduler, "get_kv_cache_usage"): "",
    (EngineCore, "__init__"): "vllm_config executor_class log_stats executor_fail_callback include_finished_set",
    (EngineCore, "preprocess_add_request"): "request",
    (EngineCore, "post_step"): "model_executed",
    (EngineCore, "step"): "",
    (EngineCore, "step_with_batch_queue"): "",
    (EngineCore, "log_error_detail"): "scheduler_output",
    (EngineCore, "_process_aborts_queue"): "",
    (EngineCore, "_attach_weight_version"): "outputs",
    (Scheduler, "_update_after_schedule"): "scheduler_output",
    (AsyncScheduler, "_update_after_schedule"): "scheduler_output",
    (Scheduler, "_update_request_with_output"): "request new_token_ids is_stale",
    (AsyncScheduler, "_update_request_with_output"): "request new_token_ids is_stale",
    (CPUWorker, "init_device"): "",
}
"""Behind `self`."""


def test_the_pinned_version_is_installed() -> None:
    assert vllm.__version__.startswith(SUPPORTED_VLLM)


@pytest.mark.parametrize(("owner", "name"), PARAMETERS, ids=lambda value: getattr(value, "__name__", value))
def test_hooked_methods_have_the_parameters_we_pass_on(owner: type, name: str) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *PARAMETERS[owner, name].split()]


def test_arguments_of_calls_are_converted_by_a_static_method() -> None:
    assert list(inspect.signature(EngineCoreProc._convert_msgspec_args).parameters) == ["method", "args"]


SAID: list[tuple[Any, str, str]] = [
    (Scheduler.schedule, "self.dynamic_sd_lookup is None", "it suppresses placeholder drafts of resumed requests"),
    (Scheduler.schedule, "num_new_tokens = request.num_tokens - num_computed_tokens", "the prefill covers output tokens"),
    (Scheduler.schedule, "req._all_token_ids,", "the V2 runner is told of output tokens"),
    (Scheduler._handle_blocked_waiting_request, "struct_output_req.grammar is None", "a request waits for its grammar"),
    (Runner._bookkeeping_sync, "gen.set_offset(gen.get_offset() - 4)", "SeededPrefill can go when this has gone"),
    (Runner._bookkeeping_sync, "discard_request_mask", "fixed responses leave its rows alone"),
    (Runner.sample_tokens, "._sample(logits, spec_decode_metadata) ... ._bookkeeping_sync(", "fixed responses come in between"),
    (
        Runner.execute_model,
        "_model_forward( ... self.execute_model_state = ExecuteModelState(",
        "features come first",
    ),
    (Runner.__init__, "self.uniform_decode_query_len = 1 + self.num_spec_tokens", "for whole steps, which are captured"),
    (Runner.__init__, "self.cudagraph_dispatcher = CudagraphDispatcher(", "which knows that length"),
    (Runner._check_and_update_cudagraph_mode, f"{LENGTH} ... {LENGTH}", "once for the sizes and once for the keys"),
    (CudagraphDispatcher._create_padded_batch_descriptor, LENGTH, "a step of that length is a whole one"),
    (Runner._update_states, "output_token_ids=[],", "ResumedOutputs can go when the V1 runner is told of them, too"),
    (Runner._update_states, "prev_num_draft_len and self.use_async_scheduling", "early steps go over between two steps"),
    (Runner._prepare_input_ids, "self.input_batch.prev_sampled_token_ids is None:", "likewise"),
    (Runner._prepare_inputs, "use_spec_decode = self.speculative_config is not None", "else PlainUndraftedSteps can go"),
    (InputBatch.add_request, "token_ids_cpu[req_index, start_idx:end_idx] = request.output_token_ids", "as of resumed ones"),
    (InputBatch.add_request, "self._register_add_request(request)", "min_tokens is told of output tokens"),
    (StructuredOutputManager.grammar_init, "self.executor.submit(self._create_grammar, request)", "`resume` waits behind it"),
    (StructuredOutputManager.accept_tokens, "if grammar_start > len(new_token_ids):", "what `resume._advanced` does"),
    (StructuredOutputManager.accept_tokens, "structured_req.reasoning_ended = True", "likewise"),
    (
        StructuredOutputManager.accept_tokens,
        "grammar.accept_tokens(request.request_id, new_token_ids[grammar_start:])",
        "likewise",
    ),
    (StructuredOutputRequest._check_grammar_completion, "self._grammar = e", "one request fails alone"),
    (AsyncScheduler._update_after_schedule, "] * scheduler_output.num_spec_tokens_to_schedule", "placeholders of early steps"),
    (rejection_sampler.apply_sampling_constraints, "temperature = expand_batch_to_tokens(", "which we replace"),
    (sampler.Sampler.gather_logprobs, "batched_count_greater_than(logprobs, token_logprobs)", "which we replace"),
    (convert_mapping, "x > 0 else -1", "rows without an adapter have the index of none"),
    (lora_ops.sgmv_shrink, "bgmv_shrink(inputs, lora_a_weights", "which we replace"),
]
"""What the source of a function says (` ... `: and then), and why it matters."""


@pytest.mark.parametrize(("function", "texts", "why"), SAID)
def test_functions_still_say_what_the_hooks_rely_on(function: Any, texts: str, why: str) -> None:
    rest = inspect.getsource(function)
    for text in texts.split(" ... "):
        assert text in rest, why
        rest = rest.partition(text)[2]


def test_features_of_a_step_and_requests_have_one_place_each() -> None:
    assert {"hidden_states", "aux_hidden_states"} <= {*ExecuteModelState._fields}
    assert inspect.getsource(Runner._update_states).count("self.input_batch.add_request(") == 1


def test_steps_are_captured_up_to_the_size_that_is_named_or_to_vllms_own() -> None:
    for named, largest in ((None, GRAPH_TOKENS), (576, 576)):
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=False),
            scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS),
            compilation_config=CompilationConfig(max_cudagraph_capture_size=named),
            speculative_config=None,
            performance_mode="balanced",
            uniform_decode_query_len=9,
        )
        VllmConfig._set_cudagraph_sizes(config)
        assert config.compilation_config.cudagraph_capture_sizes[-1] == largest


def test_early_steps_know_all_that_differs_in_asynchronous_scheduling() -> None:
    """`engine/early.py` takes the second half of a step, `worker/early.py` goes over between two steps."""
    step = inspect.getsource(EngineCore.step_with_batch_queue)
    assert step.count("batch_queue.appendleft((future, ") == 2
    finish = step[step.index("batch_queue.pop()") : step.index("if deferred_scheduler_output:\n            # When")]
    for line in ("future.result()", "_process_aborts_queue()", "scheduler.update_from_output(", "_attach_weight_version("):
        assert line in finish
    own = {name for name, _ in inspect.getmembers(AsyncScheduler, inspect.isfunction) if name in vars(AsyncScheduler)}
    # vLLM 0.33 takes back placeholders in the scheduler that both have in common, from requests that have some.
    in_common = "request.num_output_placeholders > 0" in inspect.getsource(Scheduler._update_request_with_output)
    overridden = set() if in_common else {"_update_request_with_output"}
    assert own == {"__init__", "_update_after_schedule"} | overridden
    readers = {name for name, f in inspect.getmembers(Runner, inspect.isfunction) if "use_async_s" in inspect.getsource(f)}
    assert readers == {
        "__init__",
        "_update_states",
        "_prepare_inputs",
        "_sample",
        "_bookkeeping_sync",
        "sample_tokens",
        "_copy_draft_token_ids_to_cpu",
        "_copy_valid_sampled_token_count",
    }
    kept = {name for name in vars(InputBatch) if "async" in name}
    assert kept == {"set_async_sampled_token_ids", "update_async_output_token_ids", "update_async_spec_token_ids"}


def test_vllms_own_sampler_of_drafts_needs_some() -> None:
    with pytest.raises(RuntimeError, match="numel"):
        apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))


def test_the_search_for_kernels_gets_past_the_noise() -> None:
    """Where drafter and verifier are loaded together, vLLM searches modules that Numba is among."""
    assert "llvmlite.binding.ffi" in sys.modules
    _rebind_kernels([])


def test_parameters_are_expanded_by_the_function_we_replace() -> None:
    parameters = ["cu_num_tokens", "num_tokens", "replace_from", "replace_to"]
    for function in (rejection_sampler.expand_batch_to_tokens, expand):
        assert list(inspect.signature(function).parameters)[1:] == parameters


def test_counting_without_a_compiler_is_what_vllm_compiles() -> None:
    rows = torch.randn(5, 100)
    values = rows[:, :1]
    uncompiled = logprobs.batched_count_greater_than._torchdynamo_orig_callable
    assert torch.equal(count_at_least(rows, values), uncompiled(rows, values))


def test_rows_without_an_adapter_get_nothing_of_the_adapter_of_others() -> None:
    """vLLM's kernels on the CPU give them the last adapter, whose index is -1 too."""
    weights, rows, output = torch.randn(2, 1, 3, 4), torch.randn(3, 4), torch.ones(3, 3)
    shrink(rows, weights, output, torch.tensor([-1, 1, 0]), 0.5)
    expected = [torch.zeros(3), weights[1, 0] @ rows[1] * 0.5, weights[0, 0] @ rows[2] * 0.5]
    torch.testing.assert_close(output, torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_repeats_each_value_and_replaces(dtype: torch.dtype) -> None:
    output = expand(torch.tensor([3, 0, 5, 7], dtype=dtype), torch.tensor([2, 5, 5, 6], dtype=torch.int32), 6, 0, 1)
    assert output.dtype == dtype
    assert output.tolist() == [3, 3, 1, 1, 1, 7]
