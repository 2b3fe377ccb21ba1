"""The main function of a verifier process in mode `native` that tells what vLLM's DFlash proposer was given and proposed.

A DSpark head runs in it too: vLLM's V1 runner has the block that it needs and its network, but not the drawing of its tokens.
These are drawn by the code of the V2 runner.  Tests only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposed:
    """One proposal of vLLM's: a request's new rows, the token behind them, and the draft."""

    request_id: str
    tokens: list[int]
    positions: list[int]
    features: Tensor
    """`[rows, n * hidden]`."""
    next_token: int
    draft: list[int]


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs one `VerifierProcess`; answers each message with what was proposed so far, until the pipe closes."""
    import vllm  # noqa: F401  (must be the first of vLLM's modules)
    from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from backend.config import Settings
    from backend.verifier.process import VerifierProcess

    proposed: list[Proposed] = []
    outputs: list[Tensor] = []
    forward = Qwen3DSparkForCausalLM.forward

    def compute(self: Any, *args: Any, **given: Any) -> Tensor:
        outputs[:] = [forward(self, *args, **given)]
        return outputs[0]

    Qwen3DSparkForCausalLM.forward = compute
    ModelRegistry.register_model("DFlashQwen3DSparkModel", Qwen3DSparkForCausalLM)
    begun, original, runners = DFlashProposer.__init__, DFlashProposer.propose, list[Any]()

    def begin(self: Any, config: Any, device: Any, runner: Any = None) -> None:
        runners.append(runner)
        begun(self, config, device, runner)

    def propose(self: Any, *args: Any, **given: Any) -> Any:
        given |= dict(zip(("num_speculative_tokens", "target_token_ids", "target_positions"), args, strict=False))
        tokens, positions, features = (
            given[name].clone() for name in ("target_token_ids", "target_positions", "target_hidden_states")
        )
        following = given["next_token_ids"].tolist()
        drafts = original(self, **given)
        if outputs:
            drafts = _drawn(self, outputs.pop(), given["next_token_ids"])
        begins, rejected = given["common_attn_metadata"].query_start_loc.tolist(), given.get("num_rejected_tokens_gpu")
        for i, request_id in enumerate(runners[-1].input_batch.req_ids):
            rows = slice(begins[i], begins[i + 1] - (0 if rejected is None else int(rejected[i])))
            own = tokens[rows].tolist(), positions[rows].tolist(), features[rows]
            proposed.append(Proposed(request_id, *own, following[i], drafts[i].tolist()))
        return drafts[:, : self.num_speculative_tokens]

    DFlashProposer.__init__ = begin
    DFlashProposer.propose = propose
    process = VerifierProcess("native", "incarnation", Settings.model_validate(job["settings"]), job["paths"], job["address"])
    process.start()
    pipe.send(process.address)
    while True:
        try:
            pipe.recv()
        except EOFError:
            break
        pipe.send(proposed)
    process.stop()


def _drawn(proposer: Any, hidden: Tensor, anchors: Tensor) -> Tensor:
    """The tokens that vLLM's V2 runner draws from a DSpark head's outputs `[requests * rows, hidden]`, `[requests, tokens]`."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    count, rows = len(anchors), 1 + proposer.num_speculative_tokens
    places = torch.arange(count * rows).view(count, rows)
    if not getattr(proposer.draft_model_config.hf_config, "sample_from_anchor", True):
        places = places[:, 1:]
    steps = places.shape[1]
    speculator = SimpleNamespace(
        _draft_topk=None,
        _anchor_idx=torch.arange(count),
        _step_cols=torch.arange(steps),
        _maybe_predict_acceptance=lambda *given: None,
        draft_logits=None,
        draft_tokens=torch.zeros(count, steps, dtype=torch.int64),
        input_buffers=SimpleNamespace(input_ids=anchors),
        model=proposer.model,
        num_speculative_steps=steps,
        sample_idx_mapping=torch.zeros(count * steps, dtype=torch.int64),
        sample_indices=places.flatten(),
        sample_pos=torch.zeros(count * steps, dtype=torch.int64),
        use_confidence_head=False,
    )
    speculator._sample_logits = partial(DSparkSpeculator._sample_logits, speculator)
    DSparkSpeculator._sample_sequential(speculator, count, hidden)
    return speculator.draft_tokens
