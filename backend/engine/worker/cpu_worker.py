"""vLLM's CPU worker with our runner mixins, and repairs of vLLM on the CPU.  Worker process.

Never to be imported where there is a GPU: vLLM's module replaces torch's streams, events and memory functions.

`expand`: vLLM 0.32 expands per-request sampling parameters (temperature, top-k, top-p) to per-token ones with a Triton kernel.
The CPU stand-in for that kernel converts every tensor to int64 and drops the copy it wrote to.  The caller then divides logits
by uninitialised memory: at temperature 1, tokens that vLLM's rejection sampler verifies on the CPU do not follow the target's
distribution.  (vllm/utils/cpu_triton_utils.py, `_expand_kernel_impl`; upstream report: vllm-project/vllm pull request 42638.)
Only sampled requests in mode `native` use this kernel.

`count_at_least`: vLLM compiles its own kernel when a request first asks for log probabilities, which stops the verifier for
seconds.

`shrink`: rows of a batch without an adapter have the index -1, for which vLLM's kernel takes the last adapter loaded.

`repack_output_matrix`: on a CPU, vLLM keeps a packed copy of the output matrix.  If that matrix is tied to the embedding, no
weight of its name is ever loaded.  So an exchange of weights would leave the old copy in place, and the model wrong.
(vllm/model_executor/model_loader/reload/layerwise.py, `finalize_layerwise_processing`.)
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from backend.engine.worker.gpu_worker import Mixed
from backend.engine.worker.runner import PlainUndraftedSteps, SeededPrefill

_shrink = lora_ops.bgmv_shrink


def expand(
    per_request: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value once per token: `per_request` `[requests]` as `[num_tokens]`; in place of vLLM's function.

    `cu_num_tokens` `[requests]` is the cumulative number of tokens, up to and including each request.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(per_request == replace_from, replace_to, per_request)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def count_at_least(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """For each row of `rows` `[rows, entries]`, how many entries are at least the row's value in `values` `[rows, 1]`."""
    return (rows >= values).sum(-1)


def shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, adapters: torch.Tensor, scaling: float = 1.0
) -> None:
    """vLLM's kernel of the first matrix of adapters; `adapters` `[rows]` is -1 where a row has none."""
    _shrink(inputs, weights, output, adapters, scaling)
    output.masked_fill_((adapters < 0).unsqueeze(1), 0.0)


def repair_cpu_kernels() -> None:
    """Replaces the kernels, after vLLM has registered its own."""
    sampler.batched_count_greater_than = count_at_least
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink
    rejection_sampler.expand_batch_to_tokens = expand


def repack_output_matrix(model: torch.nn.Module) -> None:
    """Packs the output matrix again; must be called after every exchange of weights."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


class OutriderCpuWorker(Mixed, CPUWorker):
    """vLLM's CPU worker with our mixins."""

    platform_mixins = (SeededPrefill, PlainUndraftedSteps)

    def init_device(self) -> None:
        """vLLM's method of the same name."""
        super().init_device()
        repair_cpu_kernels()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's method of the same name."""
        super().reload_weights(*args, **kwargs)
        repack_output_matrix(self.model_runner.get_model())

    def finish_weight_update(self) -> None:
        """vLLM's method of the same name."""
        super().finish_weight_update()
        repack_output_matrix(self.model_runner.get_model())
