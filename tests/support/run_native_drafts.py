"""The main function of a verifier process in mode `native` that tells what vLLM's DFlash proposer was given and proposed.

Tests only.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

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
    from vllm.v1.spec_decode.dflash import DFlashProposer

    from backend.config import Settings
    from backend.verifier.process import VerifierProcess

    proposed: list[Proposed] = []
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
        begins, rejected = given["common_attn_metadata"].query_start_loc.tolist(), given.get("num_rejected_tokens_gpu")
        for i, request_id in enumerate(runners[-1].input_batch.req_ids):
            rows = slice(begins[i], begins[i + 1] - (0 if rejected is None else int(rejected[i])))
            own = tokens[rows].tolist(), positions[rows].tolist(), features[rows]
            proposed.append(Proposed(request_id, *own, following[i], drafts[i].tolist()))
        return drafts

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
