"""Replacements for two of vLLM's CPU kernels, and a third that is kept up to date.  Worker process.

The first breaks sampling under speculation.

vLLM 0.32 expands per-request sampling parameters (temperature, top-k, top-p) to per-token ones with a Triton kernel.  Its CPU
stand-in converts every tensor to int64 and drops the copy it wrote to, so the caller divides logits by uninitialised memory:
at temperature 1, tokens that vLLM's rejection sampler verifies on the CPU do not follow the target's distribution.
(vllm/utils/cpu_triton_utils.py, `_expand_kernel_impl`; upstream report: vllm-project/vllm pull request 42638.)  Greedy requests
never reach it, nor do modes other than `native` (`sampling.py`).

Its replacement is put where vLLM's own registry of platform kernels would put it.  The registry itself is not used: it searches
every loaded module for references, and trips over some of them.

The second compiles itself when a request first asks for log probabilities: the verifier would stand still for seconds.

The third is the product with the output matrix, of which vLLM keeps a packed copy on a CPU.  Where the matrix is tied to the
embedding no weight of that name is ever loaded, so an exchange of weights leaves the copy as it was, and the model wrong.
(vllm/model_executor/model_loader/reload/layerwise.py, `finalize_layerwise_processing`.)
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.triton_utils import HAS_TRITON
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.sample import rejection_sampler, sampler


def expand(
    output: torch.Tensor,
    per_request: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    max_num_tokens: int = 0,
) -> None:
    """Writes each request's value once per token: `per_request` `[requests]`, `output` `[tokens]`.

    `cu_num_tokens` `[requests]` counts tokens up to and including each request.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(per_request == replace_from, replace_to, per_request)
    output.copy_(torch.repeat_interleave(values, counts))


def count_at_least(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many of each row of `rows` `[rows, entries]` are no less than the row's of `values` `[rows, 1]`."""
    return (rows >= values).sum(-1)


def repair_cpu_kernels() -> None:
    """Call once vLLM has registered its own CPU kernels; where Triton runs on the CPU, the first stays vLLM's."""
    sampler.batched_count_greater_than = count_at_least
    if HAS_TRITON:
        return
    launcher = rejection_sampler._expand
    launcher.kernel = KernelOverride(rejection_sampler.expand_kernel, expand)
    # The launcher remembers its kernel's argument names.
    vars(launcher).pop("_kernel_arg_names", None)


def repack_output_matrix(model: torch.nn.Module) -> None:
    """Call when weights have been exchanged."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
