"""Mixins for vLLM's V1 model runner.  Worker process, on the thread that runs the model.

- `RemoteDrafting` passes every step's final features to the `FeatureShipper`.
- `SeededPrefill` repairs seeded requests in mode `native` on the CPU when their prompt takes several chunks.
- `PlainUndraftedSteps` skips vLLM's rejection sampler in steps without drafts, in mode `native` on the CPU.
- `ResumedOutputs` takes in requests that another verifier has begun.

`gpu_worker.py` mixes them into the runner class that vLLM chose.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from backend.engine.counting import StepOrders
from backend.engine.features import FeatureShipper
from backend.engine.row_log import StepRows
from backend.engine.spans import TRACE_ARGUMENT
from backend.engine.worker.early import EarlyRunner
from backend.engine.worker.fixed import fixed_response
from backend.speculation.proposals import Proposal
from backend.wire.drafting import Open
from backend.wire.engine import GREEDY_BELOW, INDEPENDENT, NOISE_SEED, NOT_LEARNED


class SeededPrefill:
    """Sets a request's seeded generator aside while vLLM samples a token for an unfinished prefill.

    vLLM draws a token for a non-final prefill chunk, discards it, and rewinds the request's generator by an offset.  CPU
    generators have no offset and raise.  A generator that is set aside draws nothing and needs no rewinding.
    (vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_bookkeeping_sync`.)
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's method of the same name."""
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]  # type: ignore[attr-defined]
        aside = {int(i): batch.generators.pop(int(i)) for i in discarded if int(i) in batch.generators}
        try:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            batch.generators.update(aside)


class PlainUndraftedSteps:
    """Samples a step without any draft token as a plain step.

    With speculation configured (mode `native`), vLLM sends every step through its rejection sampler.  Without draft tokens that
    sampler takes the maximum of an empty tensor, on the CPU, for a request with `top_k` and no `top_p`: the engine fails.
    The plain sampler gives the same result.  (vLLM 0.32, `v1/sample/ops/topk_topp_sampler.py`, `apply_top_k_only`.)
    """

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        if spec_decode_metadata is not None and not any(spec_decode_metadata.num_draft_tokens):
            spec_decode_metadata = None
        return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]


class ResumedOutputs:
    """Takes in new requests that already have output tokens.

    vLLM's V1 runner starts every new request with an empty output.  `CountingScheduler` lists existing output tokens in
    `scheduler_output.outrider.resumed`.  They must be set before the request enters the batch: penalties, `min_tokens` and the
    length of the prefill depend on them.  (vLLM 0.32, `v1/worker/gpu_model_runner.py`, `_update_states`.  vLLM's V2 runner gets
    these tokens from vLLM itself.)
    """

    def _update_states(self, scheduler_output: Any) -> Any:
        resumed = scheduler_output.outrider.resumed
        if not resumed:
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        add = batch.add_request

        def add_with_outputs(request: Any) -> Any:
            if not request.output_token_ids:
                request.output_token_ids.extend(resumed.get(request.req_id, ()))
            return add(request)

        batch.add_request = add_with_outputs
        try:
            return super()._update_states(scheduler_output)  # type: ignore[misc]
        finally:
            del batch.add_request


class RemoteProposer:
    """The proposer in vLLM's configuration when drafters are remote: it proposes nothing.

    vLLM's method `custom_class` switches on the speculative paths of scheduler and runner.  `RemoteDrafting` replaces the call
    to `propose`.
    """

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any) -> None:
        """Does nothing: there are no weights, but vLLM's CPU runner calls this method."""

    def propose(self, *args: Any) -> None:
        """Never called; vLLM checks that the method exists."""


class RemoteDrafting(EarlyRunner):
    """Ships features to drafters instead of proposing drafts.  `shipper` is None except on the rank that sends."""

    shipper: FeatureShipper | None
    aux_layers: tuple[int, ...]
    proposals: dict[str, Proposal]

    ships_features: bool
    cudagraph_dispatcher: Any
    num_spec_tokens: int
    max_num_tokens: int
    execute_model_state: Any
    _step: StepRows
    """The running step's rows."""

    def set_up_drafting(self, shipper: FeatureShipper | None, aux_layers: tuple[int, ...], ships_features: bool) -> None:
        """Must be called between construction and `load_model`.

        `aux_layers` are the layers that an EAGLE-3 head reads.  If empty, the last hidden state is the feature (EAGLE-1), or
        there are no features (n-gram).
        """
        # Steps that begin early switch it on.  vLLM's own asynchronous drafting stays off.
        self.use_async_scheduling = self.use_async_spec_decode = False
        self.shipper = shipper
        if shipper is not None:
            shipper.opening = self._opening
        self.aux_layers = aux_layers
        self.ships_features = ships_features
        self.use_aux_hidden_state_outputs = bool(aux_layers)
        # vLLM captures whole steps as CUDA graphs for batches in which every request has this number of tokens.  Our drafts
        # differ in length, so only plain steps are such batches.  (vLLM 0.32 assumes 1 + K.)
        self.uniform_decode_query_len = self.cudagraph_dispatcher.uniform_decode_query_len = 1

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """vLLM's method of the same name; first reports finished requests to drafters, also in a step that runs nothing."""
        orders: StepOrders = scheduler_output.outrider
        self.proposals = orders.proposals
        if self.shipper is None:
            return super().execute_model(scheduler_output, intermediate_tensors)
        self.shipper.finish(scheduler_output.finished_req_ids)
        self.shipper.features_needed = orders.features_needed
        self.shipper.asks, self.shipper.chance_weights = orders.asks, orders.chance_weights
        self.shipper.pairings.update(orders.pairings)
        if not scheduler_output.total_num_scheduled_tokens:
            self.shipper.ship(StepRows([], [], [], [], []))
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if (state := self.execute_model_state) is not None:
            self._step = self._rows(scheduler_output)
            if self.ships_features:
                self.shipper.begin(self._step, state.aux_hidden_states or [state.hidden_states], orders.is_early)
        return output

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's method of the same name, by which it measures memory.  It counts one row a request; drafts have more."""
        rows = min(len(hidden_states) * (1 + self.num_spec_tokens), self.max_num_tokens)
        return super()._dummy_sampler_run(hidden_states.repeat(1 + self.num_spec_tokens, 1)[:rows])  # type: ignore[misc, no-any-return]

    def _calc_spec_decode_metadata(self, num_draft_tokens: Any, cu_num_scheduled_tokens: Any) -> SpecDecodeMetadata:
        """vLLM's method of the same name.  A step without drafts needs one of its six tables."""
        if num_draft_tokens.any():
            return super()._calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)  # type: ignore[misc]
        last: Any = self.query_start_loc.gpu[1 : len(num_draft_tokens) + 1] - 1  # type: ignore[attr-defined]
        none = last[:0]
        return SpecDecodeMetadata(
            draft_token_ids=none,
            num_draft_tokens=[0] * len(num_draft_tokens),
            cu_num_draft_tokens=none,
            cu_num_sampled_tokens=none,
            target_logits_indices=none,
            bonus_logits_indices=none,
            logits_indices=last,
        )

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        return self.aux_layers or None

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # vLLM's own test covers the whole batch: one request near its context limit would stop drafting for all requests.
        return common_attn_metadata is not None

    def propose_draft_token_ids(self, scheduler_output: Any, sampled_token_ids: Any, *_: Any) -> list[list[int]]:
        """vLLM's method of the same name, which it calls after sampling."""
        if self.shipper is not None:
            step = self._final(sampled_token_ids, scheduler_output.scheduled_spec_decode_tokens)
            if self.ships_features:
                self.shipper.end(step)
            else:
                self.shipper.ship(step)
        return [[] for _ in sampled_token_ids]

    def take_draft_token_ids(self) -> None:
        """Returns None: vLLM asks after each step, but drafts reach the scheduler through a socket of their own."""
        return None

    def _opening(self, request_id: str, tokens: list[int], rows: int) -> Open:
        state = self.requests.get(request_id)  # type: ignore[attr-defined]
        params = state.sampling_params if state is not None else None
        if params is None:
            return Open(request_id, len(tokens), tokens, rows)
        arguments = params.extra_args or {}
        # A fixed response was not sampled with this noise.
        sampled = params.temperature >= GREEDY_BELOW and fixed_response(params) is None
        seed, temperature = (arguments.get(NOISE_SEED, 0), params.temperature) if sampled else (0, 0.0)
        return Open(
            request_id,
            len(tokens),
            tokens,
            rows,
            seed,
            temperature,
            trace=str(arguments.get(TRACE_ARGUMENT, "")),
            prompt=state.num_prompt_tokens,
            learn=not arguments.get(NOT_LEARNED),
            independent=bool(sampled and arguments.get(INDEPENDENT)),
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _rows(self, scheduler_output: Any) -> StepRows:
        """The step's rows, before it is known which are final."""
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        request_ids, of = list(batch.req_ids), scheduler_output.num_scheduled_tokens
        starts = batch.num_computed_tokens_cpu[: len(request_ids)].tolist()
        return StepRows(request_ids, starts, [0] * len(starts), [of[each] for each in request_ids], batch.token_ids_cpu)

    def _final(self, sampled: list[list[int]], drafts: dict[str, list[int]]) -> StepRows:
        """The step's rows; those of rejected draft tokens are not final."""
        computed = self._step.computed
        if not sampled or not drafts:
            return self._step._replace(counts=computed)
        drafted = [len(drafts.get(each, ())) for each in self._step.request_ids]
        counts = [n - d + len(own) - 1 if own else n for n, d, own in zip(computed, drafted, sampled, strict=True)]
        return self._step._replace(counts=counts)
