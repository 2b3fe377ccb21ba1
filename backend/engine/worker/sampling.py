"""Samples the tokens of a step with each request's noise.  Worker process, on the thread that runs the model.

The token at position t is the v that maximises log p_t(v) + G(seed, t, v), with noise G from `backend/noise`.  That is a sample
of p_t, but it depends only on the seed and the preceding tokens.  A draft token is accepted while it equals the sampled token;
the sampled token replaces the first draft token that differs.  So the text is the same for any draft (Gumbel coupling,
arXiv 2408.07978).  Greedy requests have no noise.

Drafts of requests that need not repeat (`INDEPENDENT`) are judged by `rejection.py` instead.  Only the token after
the accepted ones is drawn with G.

The target's distribution p comes from vLLM's own processors, applied to each row as if the draft tokens before it had been
emitted.  vLLM's rejection sampler is not used; what it does not support (`min_p`, `logit_bias`, custom processors) works here.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.bad_words import apply_bad_words
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker import gpu_model_runner

from backend.engine.worker import thinking
from backend.engine.worker.rejection import judge, table_of
from backend.noise import behind, choose, uniforms
from backend.speculation.proposals import Proposal
from backend.wire.engine import GREEDY_BELOW, INDEPENDENT, LOGPROBS_MODE, NOISE_SEED


class LogitRows:
    """The rows of logits in a step: request i has `drafted[i] + 1` of them, one after the other.

    `request` and `depth` are `[rows]`: the index of the row's request, and the number of draft tokens before the row.
    """

    def __init__(self, drafted: Sequence[int], device: torch.device) -> None:
        self.drafted = drafted
        self.device = device
        self.deepest = max(drafted, default=0)
        self.counts = np.asarray(drafted, dtype=np.int64) + 1
        self.starts = np.cumsum(self.counts) - self.counts
        self.request = np.repeat(np.arange(len(drafted)), self.counts)
        self.depth = np.arange(len(self.request)) - np.repeat(self.starts, self.counts)
        self.on_device: Tensor = torch.empty(0)
        if self.deepest:
            self.on_device = async_tensor_h2d(self.request, device=device)

    def spread(self, per_request: Tensor) -> Tensor:
        """`[requests, ...]` to `[rows, ...]`."""
        return per_request[self.on_device] if self.deepest else per_request

    def flatten(self, table: Tensor) -> Tensor:
        """`[requests, deepest + 1, ...]` to `[rows, ...]`."""
        return table[self.on_device, async_tensor_h2d(self.depth, device=self.device)] if self.deepest else table[:, 0]

    def table(self) -> Tensor:
        """The row of each request and depth, `[requests, deepest + 1]`; a request's last row fills up missing depths."""
        depths = np.minimum(np.arange(self.deepest + 1), np.asarray(self.drafted)[:, None])
        table: Tensor = async_tensor_h2d(self.starts[:, None] + depths, device=self.device)
        return table


class SharedNoise:
    """Mixin over vLLM's V1 model runner: `_sample` draws with each request's own noise."""

    proposals: dict[str, Proposal] = {}  # noqa: RUF012 (replaced in each step)
    """What the drafts of the running step were sampled from, by request."""

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> SamplerOutput:
        """vLLM's method of the same name; `logits` is `[rows, vocabulary]`."""
        runner: Any = self
        batch = runner.input_batch
        batch.update_async_output_token_ids()
        metadata: SamplingMetadata = batch.sampling_metadata
        drafts = None
        drafted = [0] * len(batch.req_ids)
        if spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens):
            drafts, drafted = spec_decode_metadata.draft_token_ids, spec_decode_metadata.num_draft_tokens
        rows = LogitRows(drafted, logits.device)
        raw = None
        if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
            modes = (_argument(runner.requests[each], LOGPROBS_MODE, runner.sampler.logprobs_mode) for each in batch.req_ids)
            raw = np.array([mode.startswith("raw") for mode in modes])
        processed, kept = _processed(logits, metadata, rows, runner.sampler, raw)
        if metadata.all_greedy:
            emitted = _accepted(runner.sampler.greedy_sample(processed), drafts, rows)
        else:
            emitted = self._drawn(processed, drafts, rows)
        return SamplerOutput(emitted.to(torch.int32), _logprobs(kept, emitted, metadata, rows, runner.sampler))

    def _drawn(self, logits: Tensor, drafts: Tensor | None, rows: LogitRows) -> Tensor:
        """What each verification emits, `[requests, deepest + 1]`, padded with -1; some request is not greedy."""
        runner: Any = self
        batch = runner.input_batch
        states = [runner.requests[each] for each in batch.req_ids]
        temperature = batch.sampling_metadata.temperature
        assert temperature is not None
        scales = (temperature >= GREEDY_BELOW).to(torch.float32)
        lengths = batch.num_tokens_no_spec[: len(states)].astype(np.int64)
        seeds = np.array([_argument(each, NOISE_SEED, 0) for each in states], dtype=np.uint64).view(np.int64)
        free = [i for i, each in enumerate(states) if rows.drafted[i] and _argument(each, INDEPENDENT, False)]
        if drafts is None or not free:
            return _accepted(_choose(logits, scales, rows, seeds, lengths), drafts, rows)
        judged = _judge(logits, drafts, rows, free, [self.proposals.get(batch.req_ids[i]) for i in free], seeds, lengths)
        if len(free) == len(states):
            return judged
        at = async_tensor_h2d(np.array(free), device=logits.device)
        # What is chosen for these is replaced: no noise is computed for it.
        chosen = _choose(logits, scales.index_fill(0, at, 0.0), rows, seeds, lengths)
        return _accepted(chosen, drafts, rows).index_copy_(0, at, judged)


def _argument(state: Any, name: str, default: Any) -> Any:
    params = state.sampling_params
    return params.extra_args.get(name, default) if params is not None and params.extra_args else default


def _choose(
    logits: Tensor, scales: Tensor, rows: LogitRows, seeds: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]
) -> Tensor:
    """The verifier's own token of each row, `[rows]`; `logits` are already divided by the temperature.

    `scales` `[requests]`: the share of noise in each request's choice; 0 if it is greedy.
    """
    keys = np.stack((seeds[rows.request], lengths[rows.request] + rows.depth))
    on_device, scales = async_tensor_h2d(keys, device=logits.device), rows.spread(scales)
    return choose(logits, on_device[0], on_device[1], torch.ones_like(scales), scales).columns


def _accepted(chosen: Tensor, drafts: Tensor | None, rows: LogitRows) -> Tensor:
    """The tokens that each verification emits, `[requests, deepest + 1]`, padded with -1.

    `chosen` `[rows]` is the verifier's own token of each row.  `drafts` holds all draft tokens in row order.
    """
    if drafts is None or not rows.deepest:
        return chosen.unsqueeze(1)
    table = rows.table()
    # `drafts` has the order of the rows, but each request has one row more than draft tokens.
    draft_at = (table[:, :-1] - async_tensor_h2d(np.arange(len(rows.drafted))[:, None], device=table.device)).clamp_(
        max=len(drafts) - 1
    )
    limits = async_tensor_h2d(np.asarray(rows.drafted)[:, None], device=table.device)
    steps = torch.arange(rows.deepest + 1, device=table.device)
    same = (chosen[table[:, :-1]] == drafts[draft_at]) & (steps[:-1] < limits)
    accepted = same.long().cumprod(1).sum(1, keepdim=True)
    return chosen[table].masked_fill(steps > accepted, -1)


def _judge(
    logits: Tensor,
    drafts: Tensor,
    rows: LogitRows,
    free: Sequence[int],
    proposals: Sequence[Proposal | None],
    seeds: np.ndarray[Any, Any],
    lengths: np.ndarray[Any, Any],
) -> Tensor:
    """What the requests `free`, whose drafts are judged by rejection, emit: `[requests, deepest + 1]`, padded with -1."""
    device, counts = logits.device, np.asarray(rows.drafted)[free]
    tokens, ids, chances = table_of([[0] * n for n in counts.tolist()], proposals)
    deepest = tokens.shape[1]
    at = rows.starts[free][:, None] + np.minimum(np.arange(deepest + 1), counts[:, None])
    # Each request before has one row more than draft tokens.
    place = np.minimum(at[:, :-1] - np.asarray(free)[:, None], len(drafts) - 1)
    packed = np.concatenate((at, place, np.stack((counts, seeds[free], lengths[free]), axis=1)), axis=1)
    table, where, rest = async_tensor_h2d(packed, device=device).split((deepest + 1, deepest, 3), dim=1)
    count, seed, length = (each.contiguous() for each in rest.unbind(1))
    drawn = drafts.long()[where]
    of = async_tensor_h2d(ids, device=device)
    if None in proposals:
        certain = async_tensor_h2d(np.array([each is None for each in proposals]), device=device)
        of[:, :, 0] = torch.where(certain.unsqueeze(1), drawn, of[:, :, 0])
    u, q = uniforms(seed, length, deepest), async_tensor_h2d(chances, device=device)
    judged = judge(logits, table, count, drawn, of, q, u)
    ones = torch.ones_like(u[:, 0])
    last = choose(judged.last, seed, behind(length, judged.accepted), ones, ones).columns
    accepted = judged.accepted.unsqueeze(1)
    emitted = functional.pad(drawn, (0, rows.deepest + 1 - deepest)).scatter(1, accepted, last.unsqueeze(1))
    return emitted.masked_fill(torch.arange(rows.deepest + 1, device=device) > accepted, -1)


# -- the target's distribution -----------------------------------------------------------------------------------------


def _processed(
    logits: Tensor, metadata: SamplingMetadata, rows: LogitRows, sampler: Any, raw: np.ndarray[Any, Any] | None
) -> tuple[Tensor, Tensor | None]:
    """Logits after all processors and temperature, and the logits from which log probabilities are computed.

    `raw` `[requests]`: whose log probabilities come from the unprocessed logits; None: no request asks for any.  Tokens that
    cannot be drawn have logit `-inf`.  Steps and order follow vLLM's `Sampler.forward`.
    """
    kept = logits.to(torch.float32, copy=True) if raw is not None and raw.any() else None
    logits = logits.to(torch.float32)
    thinking.settle(metadata)
    logits = _constrain(logits, metadata, rows) if rows.deepest else sampler.apply_logits_processors(logits, metadata, False)
    if not metadata.all_greedy:
        assert metadata.temperature is not None
        temperature = metadata.temperature
        logits = logits.div_(rows.spread(torch.where(temperature < GREEDY_BELOW, 1.0, temperature)).unsqueeze(1))
        for processor in metadata.logitsprocs.argmax_invariant:
            logits = _apply_by_depth(processor, logits, metadata, rows)
        top_k, top_p = (None if each is None else rows.spread(each) for each in (metadata.top_k, metadata.top_p))
        logits = apply_top_k_top_p(logits, top_k, top_p)
    if raw is None:
        return logits, None
    if kept is None or raw.all():
        return logits, logits if kept is None else kept
    return logits, torch.where(rows.spread(async_tensor_h2d(raw, device=logits.device)).unsqueeze(1), kept, logits)


def _constrain(logits: Tensor, metadata: SamplingMetadata, rows: LogitRows) -> Tensor:
    """vLLM's `Sampler.apply_logits_processors`, for rows that follow draft tokens."""
    if metadata.allowed_token_ids_mask is not None:
        logits.masked_fill_(rows.spread(metadata.allowed_token_ids_mask), float("-inf"))
    spec = metadata.spec_token_ids or []
    outputs: list[list[int]] = []
    if metadata.bad_words_token_ids or not metadata.no_penalties:
        outputs = [
            [*metadata.output_token_ids[i], *spec[i][:depth]]
            for i, depth in zip(rows.request.tolist(), rows.depth.tolist(), strict=True)
        ]
    if metadata.bad_words_token_ids:
        by_row = {
            row: metadata.bad_words_token_ids[i]
            for row, i in enumerate(rows.request.tolist())
            if i in metadata.bad_words_token_ids
        }
        apply_bad_words(logits, by_row, outputs)
    for processor in metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            logits = processor.apply_with_spec_decode(logits, rows.counts.tolist())
        else:
            logits = _apply_by_depth(processor, logits, metadata, rows)
    if not metadata.no_penalties:
        assert metadata.prompt_token_ids is not None
        logits = apply_all_penalties(
            logits,
            rows.spread(metadata.prompt_token_ids),
            rows.spread(metadata.presence_penalties),
            rows.spread(metadata.frequency_penalties),
            rows.spread(metadata.repetition_penalties),
            outputs,
        )
    holder = metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        logits = _by_depth(logits, metadata, rows, lambda depth, of: thinking.count(metadata, depth, of))
    return logits


def _is_idle(processor: Any) -> bool:
    if isinstance(processor, MinPLogitsProcessor):
        return not processor.min_p_count
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases


def _apply_by_depth(processor: Any, logits: Tensor, metadata: SamplingMetadata, rows: LogitRows) -> Tensor:
    """Applies a processor depth by depth, to one row of each request at a time.

    Processors identify requests by place in the batch and may hold their output lists.  At each depth these lists are as long
    as in plain decoding.
    """
    if _is_idle(processor):
        return logits
    if not rows.deepest:
        return processor.apply(logits)  # type: ignore[no-any-return]
    return _by_depth(logits, metadata, rows, lambda depth, of: processor.apply(of))


def _by_depth(logits: Tensor, metadata: SamplingMetadata, rows: LogitRows, apply: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Logits after `apply(depth, logits)` at each depth, with one row per request, as in a plain step at that depth."""
    table, drafted = rows.table(), np.asarray(rows.drafted)
    for depth in range(rows.deepest + 1):
        with _emitted(metadata, depth):
            applied = apply(depth, logits[table[:, depth]])
        there = np.nonzero(drafted >= depth)[0]
        at = async_tensor_h2d(there, device=logits.device)
        logits[table[at, depth]] = applied[at]
    return logits


@contextmanager
def _emitted(metadata: SamplingMetadata, depth: int) -> Iterator[None]:
    """Within the block, each request's output list is extended by its first `depth` draft tokens."""
    outputs = metadata.output_token_ids
    lengths = [len(output) if output is not None else 0 for output in outputs]
    for output, spec in zip(outputs, metadata.spec_token_ids or [], strict=False):
        if output is not None:
            output.extend(spec[:depth])
    try:
        yield
    finally:
        for output, length in zip(outputs, lengths, strict=True):
            if output is not None:
                del output[length:]


def _logprobs(
    logits: Tensor | None, emitted: Tensor, metadata: SamplingMetadata, rows: LogitRows, sampler: Any
) -> LogprobsTensors | None:
    """Log probabilities at every place of `emitted` `[requests, deepest + 1]`; vLLM drops the padding's."""
    if logits is None:
        return None
    chosen = rows.flatten(emitted.long().clamp(min=0))
    of = logits if sampler.logprobs_mode.endswith("logits") else sampler.compute_logprobs(logits)
    by_token = metadata.logprob_token_ids
    if by_token and rows.deepest:
        by_token = {row: by_token[i] for row, i in enumerate(rows.request.tolist()) if i in by_token}
    found = sampler.gather_specific_token_logprobs(of, by_token, chosen) if by_token else None
    if metadata.max_num_logprobs == -1:
        found = LogprobsTensors(torch.empty(0), of, torch.empty(0))
    elif metadata.max_num_logprobs is not None:
        likeliest = sampler.gather_logprobs(of, metadata.max_num_logprobs, chosen)
        found = likeliest if found is None else _each_its_own(found, list(by_token or ()), likeliest)
    if found is None or not rows.deepest:
        return found
    table = rows.table().flatten()
    return LogprobsTensors(*(each[table] if each.numel() else each for each in found[:3]))


def _each_its_own(named: LogprobsTensors, of: list[int], likeliest: LogprobsTensors) -> LogprobsTensors:
    """The rows `of` of `named`, the others of `likeliest`.  vLLM reads as many columns of a row as its request asks for."""
    at, joined = async_tensor_h2d(of, device=likeliest.logprobs.device), []
    for ids, top in zip(named[:2], likeliest[:2], strict=True):
        both = top.new_zeros(len(top), max(ids.shape[1], top.shape[1]))
        both[:, : top.shape[1]] = top
        both[at, : ids.shape[1]] = ids[at]
        joined.append(both)
    return LogprobsTensors(*joined, likeliest.selected_token_ranks)


@contextmanager
def all_logits_processors() -> Iterator[None]:
    """Within the block, vLLM's runner is built with all logits processors, as without speculation.

    With speculation vLLM keeps only `min_tokens` and refuses custom processors: its rejection sampler cannot apply them.
    (vLLM 0.32, `v1/sample/logits_processor/__init__.py`, `build_logitsprocs`.)
    """
    build = gpu_model_runner.build_logitsprocs

    def build_all(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(vllm_config)
        plain.speculative_config = None
        return build(plain, *args, **kwargs)

    gpu_model_runner.build_logitsprocs = build_all
    try:
        yield
    finally:
        gpu_model_runner.build_logitsprocs = build
