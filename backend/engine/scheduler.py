"""vLLM's scheduler, extended to verify drafts from remote drafters.  Engine process, engine thread.

`DraftingScheduler` only connects vLLM's methods with `backend/speculation/speculator.py`.  The speculator decides what to
verify, which drafters to ask, how long to wait, and what to learn.  The waiting itself happens in `loop.py`.
"""

import logging
import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from backend.engine.counting import CountingScheduler
from backend.engine.grammar_repairs import DeadEnds
from backend.engine.observers import UNDRAFTED, DraftOrigin, RequestState
from backend.engine.worker.fixed import fixed_response
from backend.fleet import DrafterRef, VerifierStats
from backend.speculation.budget import KvBlocks, draft_limits
from backend.speculation.candidates import RESTS_AFTER
from backend.speculation.pairing import Pairing
from backend.speculation.speculator import Speculator
from backend.speculation.waiting import Plan
from backend.wire.drafting import Drafts, NextItem

logger = logging.getLogger(__name__)

MOST_EARLY_TOKENS = 4096
"""Computed since the last step that did not begin early.  Their features are not sent until then."""


class StockScheduler(CountingScheduler, DeadEnds, Scheduler):
    """Modes `off` and `native`: vLLM's own scheduling, counted."""


class StockAsyncScheduler(CountingScheduler, DeadEnds, AsyncScheduler):
    """Modes `off` and `native` with vLLM's asynchronous scheduling, counted."""


class DraftingScheduler(CountingScheduler, DeadEnds, AsyncScheduler):
    """Modes with remote drafting: `sync`, `ahead` and `auto`.  Only steps that begin early (`early.py`) are asynchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config["outrider"]
        self.speculator = Speculator(
            options["mode"],
            self.num_spec_tokens,
            options["ahead_outcomes"],
            options["lookup"],
            self.vllm_config.model_config.get_vocab_size(),
            options["draft_deadline_s"],
            options["one_pass"],
        )
        self._refs: dict[str, DrafterRef] = {}
        self._decoding: list[str] = []
        self._tokens = self._drafted = 0
        """Tokens of the step that just ended, and how many of them are draft tokens."""
        self._launched: deque[set[str]] = deque()
        self._prefilling: set[str] = set()
        """Requests of each step under way, and of the one that just ended, that were not decoding before it."""
        self._gave_drafts = self._is_quiet = False
        self._early_tokens = 0
        """Tokens of all steps since the last one that did not begin early."""
        self._fixed = 0
        """Requests with fixed responses: the runner must know how many tokens they have emitted."""
        self._held_back: Any = None
        """The first waiting request, if the last step had tokens left and did not admit it: the KV cache is full, say."""
        self.warm_up_drafts: int | None = None
        """During warm-up: number of meaningless draft tokens per request.  Then only step times are learned."""
        self._changes = 0
        self._block_sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        # A constant table stops vLLM from padding resumed requests with K placeholder draft tokens, which would count as
        # drafted.  The padding keeps batches uniform; here drafts differ in length anyway.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    # -- drafters ------------------------------------------------------------------------------------------------------

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """Applies a new assignment; requests that wait for a removed drafter go on without."""
        for ref in refs:
            old = self._refs.get(ref.id)
            if old is not None and old != ref:
                self.speculator.questions.reset_drafter(ref.id)
                if (old.head, old.swaps) != (ref.head, ref.swaps):
                    self.speculator.renewed(ref.id)
        self._refs = {ref.id: ref for ref in refs}
        self.speculator.set_drafters({ref.id: ref.head for ref in refs})

    def take_drafts(self, drafter_id: str, drafts: Drafts, now: float) -> None:
        """Takes in a drafter's fresh drafts; counts their times and drops."""
        if drafter_id not in self._refs:
            return
        counters, draft_s, queue_s = self.counters.drafter(drafter_id), drafts.draft_us / 1e6, drafts.queue_us / 1e6
        counters.rounds += 1
        counters.draft_s += draft_s
        counters.queue_s += queue_s
        longest, k, idle = 0.0, 0, not self.speculator.outcomes
        arrived = self.speculator.arrived(drafter_id, drafts.items, draft_s, now)
        for draft, (verdict, waited_s) in zip(drafts.items, arrived, strict=True):
            longest, k, idle = max(longest, waited_s or 0.0), max(k, len(draft.tokens)), idle and verdict == "ready"
            if verdict != "ready":
                self.counters.dropped(drafter_id, "finished" if draft.request_id not in self.requests else verdict)
        counters.round_trip_s += longest
        if idle:
            counters.transfer_s += max(longest - draft_s - queue_s, 0.0)
        if k and longest:
            self.speculator.timed(len(drafts.items), k, draft_s, queue_s, longest, now)

    def ask(self, now: float) -> dict[str, list[NextItem]]:
        """What each drafter should draft next for the requests whose step has ended."""
        asks = self.speculator.ask(now, may_wait=self._pause_state == PauseState.UNPAUSED)
        for drafter_id, items in asks.items():
            ahead = [item for item in items if item.outcomes]
            if ahead:
                counters, misses = self.counters.drafter(drafter_id), sum(not item.verifying for item in ahead)
                counters.ahead_hits += len(ahead) - misses
                counters.ahead_misses += misses
        return asks

    def wait_until(self, now: float) -> float | None:
        """Until when the next step should wait for drafts; None: begin now, as during a pause."""
        if not (self.speculator.questions.pending or self.speculator.is_deferring) or self._pause_state != PauseState.UNPAUSED:
            return None
        # Includes requests whose prefill ended in the last step, for which drafts have been asked since.
        decoding = [request.outrider.drafting for request in self.running if not request.is_prefill_chunk]
        return self.speculator.hold(decoding, self._prefill_ahead(), now)

    def learn(self) -> None:
        """Compares earlier drafts with the last step's text; called in spare time."""
        self.speculator.learn()
        if self.speculator.changes != self._changes:
            self._changes = self.speculator.changes
            choice, load = self.speculator.choice, self.speculator.load
            logger.info("%d requests: %s, K %d, %.0f tokens/s", load.requests, choice.ask, choice.k, choice.tokens_per_s)
            plain_step_s = self.speculator.step_times.at(load.requests, asking=False)
            for observer in self.observers:
                observer.decided(self.plan_in_force(), load, choice, plain_step_s)

    def may_be_early(self) -> bool:
        """Whether the next step may begin before the outcome of the one before is known."""
        if self.warm_up_drafts is not None:
            return not self.warm_up_drafts
        is_free = self._pause_state == PauseState.UNPAUSED and not self._fixed
        return is_free and self._early_tokens < MOST_EARLY_TOKENS and self.speculator.may_be_early()

    # -- counting ------------------------------------------------------------------------------------------------------

    def drafted_by(self, request: Any) -> DraftOrigin:
        draft = request.outrider.drafting.verified
        if draft is None:
            return UNDRAFTED
        return DraftOrigin(draft.source.drafter_id, draft.source.kind == "ahead", draft.draft_s, draft.source.kind)

    def plan_in_force(self) -> Plan:
        choice = self.speculator.choice
        return Plan(choice.k, choice.outcomes)

    def note_step(self, seconds: float) -> None:
        """Notes the step that just ended; a step with prefill does not measure verifying."""
        super().note_step(seconds)
        drafted, between_s = self._drafted, self._between_s
        if self._prefilling:
            self.speculator.stepped(self._requests_in_step, drafted, None, between_s)
        else:
            self.speculator.stepped(self._tokens - drafted, drafted, seconds, between_s)

    def read_plan(self, stats: VerifierStats) -> None:
        """Writes the plan, expected step times and drafters with open circuit breakers into `stats`."""
        plan, at, speculator = self.plan_in_force(), self.speculator.step_times.at, self.speculator
        stats.drafters_down = speculator.questions.down()
        stats.plan_k, stats.plan_outcomes, stats.plan_changes = plan.k, plan.outcomes, speculator.changes
        if not speculator.step_times.known:
            return
        load, n = speculator.load, max(stats.running, 1)
        stats.plain_step_s = at(n, asking=False)
        stats.drafted_step_s = at(n, n * load.drafted.tokens[plan.k or self.num_spec_tokens], asking=True)
        stats.lookup_step_s = at(n, n * load.alone.tokens[-1], asking=False)
        stats.lookup_length = 1 + load.alone.gains[-1]

    # -- vLLM's hooks --------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        """vLLM's method of the same name."""
        super().add_request(request)
        state: RequestState = request.outrider
        options, prompt_len = state.options.salted(request.cache_salt), request.num_prompt_tokens
        state.drafting = self.speculator.candidates.begin(request.request_id, options, state.rule, prompt_len)
        self._fixed += fixed_response(request.sampling_params) is not None

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's method of the same name: attach what is worth verifying, then schedule."""
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        self._decoding = [request.request_id for request in decoding]
        prefill = self._prefill_ahead()
        limits = self._draft_limits(decoding, prefill)
        drafting = [request.outrider.drafting for request in decoding]
        attached = self.speculator.attach(drafting, prefill, time.monotonic(), is_early=self.is_early, limits=limits)
        for request in decoding if self._gave_drafts else ():
            # Drafts of the last step, which had no room for the request.
            request.spec_token_ids = []
        drafts = attached.tokens if self.warm_up_drafts is None else {r: [0] * self.warm_up_drafts for r in self._decoding}
        self._gave_drafts, self._is_quiet = bool(drafts), attached.is_quiet
        if drafts:
            super().update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        for drafter_id in attached.lost:
            self.counters.dropped(drafter_id, "lost")
        self.features_needed = attached.features_needed
        output = super().schedule(throttle_prefills)
        output.outrider.pairings.update(self._pair_with_drafters(output.scheduled_new_reqs))
        output.outrider.proposals.update(attached.proposals)
        output.outrider.asks.update(attached.asks)
        if attached.asks:
            weights_of = self.speculator.candidates.chance_weights
            output.outrider.chance_weights.update({drafter_id: weights_of(drafter_id) for drafter_id in self._refs})
        tokens = output.total_num_scheduled_tokens
        could_admit = len(self.waiting) and tokens < self.max_num_scheduled_tokens
        self._held_back = self.waiting.peek_request() if could_admit else None
        self._launched.append(output.num_scheduled_tokens.keys() - set(self._decoding))
        if self.is_early:
            self._early_tokens += tokens
        elif self._early_tokens:
            self._early_tokens = 0
            for request_id, request in self.requests.items():
                if request.num_output_tokens:
                    output.outrider.settled[request_id] = request.num_output_tokens, request.output_token_ids[-RESTS_AFTER:]
        return output

    def _pair_with_drafters(self, new: list[Any]) -> dict[str, Pairing]:
        pairings = {}
        for each in new:
            adapter = each.lora_request.lora_name if each.lora_request is not None else ""
            state: Any = self.requests[each.req_id].outrider
            session = state.options.session and f"{state.options.tenant}/{state.options.session}"
            pairings[each.req_id] = self.speculator.pair(state.drafting, adapter, session)
        return pairings

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        """vLLM's method of the same name, called while the device computes: time to learn from the step before."""
        self.learn()
        return super().get_grammar_bitmask(scheduler_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Does nothing: vLLM's own proposer's (empty) drafts must not replace remote ones."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method of the same name; then tells the speculator which requests continue and need drafts."""
        requests, names = self.requests, scheduler_output.num_scheduled_tokens
        self._tokens, self._prefilling = scheduler_output.total_num_scheduled_tokens, self._launched.popleft()
        self._drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        if self._is_quiet:
            self.speculator.passed(sum(each in requests for each in names.keys() - self._prefilling))
            names = sorted(self._prefilling)
        began = [(request, request.num_tokens) for name in names if (request := requests.get(name)) is not None]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        for request, length in began:
            if request.num_tokens > length and not request.is_finished() and self.warm_up_drafts is None:
                self.speculator.ended(request.outrider.drafting, request._all_token_ids, length, now)
        return outputs

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """vLLM's method of the same name, of the scheduler that fits the step."""
        if self.is_early:
            # Or vLLM would give every request placeholders for drafts.
            scheduler_output.num_spec_tokens_to_schedule = 0
            super()._update_after_schedule(scheduler_output)
        else:
            super(AsyncScheduler, self)._update_after_schedule(scheduler_output)

    def _update_request_with_output(self, request: Any, new_token_ids: Any, is_stale: bool = False) -> Any:
        was_early = request.num_output_placeholders or is_stale
        of_step: Any = super() if was_early else super(AsyncScheduler, self)
        return of_step._update_request_with_output(request, new_token_ids, is_stale)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.speculator.release(request.outrider.drafting)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.speculator.finish(request.outrider.drafting)
        self._held_back = None
        self._fixed -= fixed_response(request.sampling_params) is not None
        return super()._free_request(request, *args, **kwargs)

    def _draft_limits(self, decoding: list[Any], prefill: int) -> dict[str, int] | None:
        """The most draft tokens of each decoding request in the next step (`budget.draft_limits`); None: any number."""
        free, others = self.kv_cache_manager.block_pool.get_num_free_blocks(), len(self.running) - len(decoding)
        blocks = KvBlocks(free, self._block_sizes, self.num_lookahead_tokens)
        lengths = [request.num_tokens for request in decoding]
        room = self.max_num_scheduled_tokens - (self._chunks_before(decoding[-1]) if decoding and others else 0)
        found = draft_limits(lengths, self.num_spec_tokens, room, blocks, others, prefill)
        return None if found is None else dict(zip(self._decoding, found, strict=True))

    def _chunks_before(self, last: Any) -> int:
        """The most prompt tokens that have room in a step before a decoding request: of long prompts, which come in chunks."""
        longest: int = self.scheduler_config.long_prefill_token_threshold or self.max_num_scheduled_tokens
        if self.adaptive_long_prefill_threshold:
            longest = max(longest, self.scheduler_config.max_num_batched_tokens // sum(self.get_request_counts()))
        before = [request for request in self.running[: self.running.index(last)] if request.is_prefill_chunk]
        return sum(min(request.num_tokens - request.num_computed_tokens, longest) for request in before)

    def _prefill_ahead(self) -> int:
        """Estimate of the prompt tokens that the next step will compute."""
        room = self.max_num_scheduled_tokens
        chunks = sum(r.num_tokens - r.num_computed_tokens for r in self.running if r.is_prefill_chunk)
        if len(self.waiting) and len(self.running) < self.max_num_running_reqs:
            first = self.waiting.peek_request()
            chunks += first.num_tokens if first is not self._held_back else 0
        return int(min(chunks, room))
