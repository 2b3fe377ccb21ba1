"""Which of vLLM's sampling parameters a client or a rollout may give."""

from __future__ import annotations

import msgspec
import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.sampling_params import SamplingParams

INTERNAL = frozenset(
    {
        "output_kind",
        "output_text_buffer_length",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
        "trace_decode_token_ids",
    }
)
"""Sampling parameters that vLLM's front half sets, or hands on to what does not run here."""
PARAMETERS = frozenset(field.name for field in msgspec.structs.fields(SamplingParams) if field.name[0] != "_") - INTERNAL
VERIFIERS = "outrider_"
"""So begin the names of the verifier's own `extra_args`; clients give `REQUEST_ID_KEY` alone."""
