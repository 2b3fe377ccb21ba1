"""vLLM's scheduler, taught to wait for drafts that are made elsewhere.  Engine process, engine thread.

`DraftingScheduler` attaches drafts that arrived, holds back requests whose drafts are still out (they stay in `running` and
keep their KV), and asks for the next drafts after every step.  How long to wait is decided by `drafts.DraftBook`; the waiting
itself happens in `loop.py`, never in here.  Where no remote draft comes, `fallback.Fallback` may give one.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from backend.fleet import FALLBACK, DrafterRef, VerifierStats
from backend.protocol import Ahead, Drafts, NextItem
from backend.verifier.ahead import AheadBook, Ended, worth_waiting
from backend.verifier.costs import Costs, Source
from backend.verifier.counting import Counters, CountingScheduler, Drafted
from backend.verifier.cycles import OFF, Plan
from backend.verifier.drafts import DraftBook, Usable
from backend.verifier.fallback import GAIN, Fallback
from backend.verifier.groups import Groups
from backend.verifier.pairing import drafter_for
from backend.verifier.planner import make_planner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepShape:
    """What a step runs over."""

    tokens: int
    decoding: frozenset[str]
    """The requests past their prompt, scheduled or not."""
    scheduled: int
    decodes_only: bool

    @classmethod
    def of(cls, output: Any, decoding: frozenset[str]) -> StepShape:
        """The shape of a scheduled step."""
        scheduled = output.num_scheduled_tokens.keys()
        return cls(output.total_num_scheduled_tokens, decoding, len(scheduled), scheduled <= decoding)


class PlainScheduler(CountingScheduler, Scheduler):
    """Modes `off` and `native`: vLLM's own scheduling, counted."""


class PlainAsyncScheduler(CountingScheduler, AsyncScheduler):
    """The same where vLLM schedules ahead of the device."""


class DraftingScheduler(CountingScheduler, Scheduler):
    """Remote drafting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = self.vllm_config.additional_config["outrider"]
        self.book = DraftBook(self.vllm_config.model_config.get_vocab_size(), options["draft_deadline_ms"] / 1000)
        self.costs = Costs()
        self.planner = make_planner(
            options["mode"], self.costs, self.num_spec_tokens, options["ahead_outcomes"], options["fallback"]
        )
        self.ahead = AheadBook()
        self.fallback = Fallback(self.num_spec_tokens if options["fallback"] else 0)
        self._alone = Plan(self.num_spec_tokens, lookup=True) if options["fallback"] else OFF
        """The plan of a verifier without drafters."""
        self._groups = Groups()
        self._plan = OFF
        self._step = StepShape(0, frozenset(), 0, False)
        self._drafter_ids: list[str] = []
        self._refs: dict[str, DrafterRef] = {}
        self._verifying: dict[str, Usable] = {}
        self._draft_s: dict[str, float] = {}
        self._untold: set[str] = set()
        """Mode `ahead`: requests verified with drafts the drafter was not told of; what it enumerates is not theirs."""
        # A constant table stops vLLM from padding resumed requests with K rejected placeholders: with drafts of any length
        # there is no uniform batch to preserve, and the placeholders would count as drafted.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    # -- drafters ------------------------------------------------------------------------------------------------------

    def set_drafters(self, refs: list[DrafterRef]) -> None:
        """The assignment changed; requests that waited for a drafter now gone decode plainly."""
        for ref in refs:
            old = self._refs.get(ref.id)
            if old is not None and old != ref:
                self.book.reset_drafter(ref.id)
        self._refs = {ref.id: ref for ref in refs}
        self._drafter_ids = sorted(self._refs)
        self.book.set_drafters(self._drafter_ids)

    def take_drafts(self, drafter_id: str, drafts: Drafts, now: float) -> None:
        """An answer came in from a drafter."""
        if self.counters is None:
            return
        counters = self.counters.drafter(drafter_id)
        draft_s = drafts.draft_us / 1e6
        counters.rounds += 1
        counters.draft_s += draft_s
        counters.queue_s += drafts.queue_us / 1e6
        longest, k, idle = 0.0, 0, len(self._groups) == 1 and not self._plan.outcomes
        for draft in drafts.items:
            verdict = self.book.arrived(drafter_id, draft.request_id, draft.base_len, draft.tokens, self.num_spec_tokens, now)
            longest, k = max(longest, verdict.waited_s or 0.0), max(k, len(draft.tokens))
            idle = idle and verdict.kind == "ready"
            if verdict.kind == "ready":
                self._draft_s[draft.request_id] = draft_s
            else:
                over = draft.request_id not in self.requests
                self.counters.dropped(drafter_id, "finished" if over else verdict.kind)
        counters.round_trip_s += longest
        drafter_s = draft_s + drafts.queue_us / 1e6
        if drafts.items and idle:
            counters.transfer_s += max(longest - drafter_s, 0.0)
        if drafts.items and k:
            self.costs.note_drafts(len(drafts.items), k, draft_s, longest if idle else None)

    def take_ahead(self, message: Ahead) -> None:
        """Blocks of outcomes came in from a drafter."""
        for block in message.items:
            if block.request_id in self.requests:
                self.ahead.take(block)
                self._draft_s[block.request_id] = message.draft_us / 1e6

    def note_verification(self, counters: Counters, request_id: str, drafted: int, accepted: int) -> Drafted | None:
        """One verification of this step."""
        draft = self._verifying.pop(request_id, None)
        if draft is not None:
            counters.verification(draft.drafter_id, drafted, accepted, self.is_teacher_forced(request_id))
        elif request_id not in self._step.decoding or self.book.down():
            return None
        own = draft is not None and draft.drafter_id == FALLBACK
        if draft is not None and not own:
            self.fallback.note_remote(request_id, drafted, accepted)
        plan = self._plan
        if plan.k and self.planner.settled:
            source: Source = "own" if own else "ahead" if draft is not None and draft.ahead else "features"
            greedy = _is_greedy(self.requests[request_id])
            self.costs.note_verification(plan, len(self._step.decoding), greedy, source, drafted, accepted)
        if draft is None:
            return None
        return Drafted(draft.drafter_id, draft.ahead, self._draft_s.pop(request_id, 0.0))

    def plan_in_force(self) -> Plan:
        """The plan of the present step."""
        return self._plan

    def note_step(self, seconds: float, cycle_s: float | None) -> None:
        """The step that just ended; prefill is another matter than verifying."""
        super().note_step(seconds, cycle_s)
        if self._step.decodes_only:
            self.costs.verify.observe(self._step.tokens, seconds)
            if self._drafter_ids:
                self.planner.stepped(len(self._step.decoding), self._step.scheduled, seconds, cycle_s)

    def read_plan(self, stats: VerifierStats) -> None:
        """Puts what is decided and who is down into `stats`."""
        stats.drafters_down = self.book.down()
        stats.plan_k, stats.plan_groups = self._plan.remote_k, self._plan.groups
        stats.plan_outcomes, stats.plan_lookup = self._plan.outcomes, self._plan.k if self._plan.lookup else 0
        stats.plan_changes = self.planner.changes
        requests, k, groups = max(stats.running, 1), self._plan.k or self.num_spec_tokens, self._plan.groups
        stats.plain_step_s = self.costs.verify.at(requests) or 0.0
        # Of the plan in force, as acceptance is: what other plans take is not measured but estimated.
        stats.drafted_step_s = groups * (self.costs.verify.at(requests * (1 + k) / groups) or 0.0)
        if (lookups := self.fallback.in_general(self.costs.greedy_share)) is not None:
            share, stats.lookup_length = lookups
            stats.lookup_step_s = self.costs.verify.at(requests * (1 + share * k)) or 0.0

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait_until(self) -> float | None:
        """When the next step must begin at the latest, if it should wait for drafts at all; None: begin now.

        All drafted requests of a group are verified together, beside the prefill where there is some.  Nothing waits when the
        engine is being paused.
        """
        if not self.book.pending or self._pause_state != PauseState.UNPAUSED:
            return None
        group = self._groups.present()
        room = len(self.running) < self.max_num_running_reqs
        if (room and len(self.waiting)) or any(request.is_prefill_chunk for request in self.running):
            draft_s, step_s = self.costs.draft_s(len(group), self._plan.k), self.costs.verify_s(1, 0)
            return self.book.deadline_beside_prefill(group, draft_s, step_s)
        return self.book.next_deadline(group)

    # -- vLLM's hooks --------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's method of the same name: attach what arrived, hold back what waits, then schedule."""
        self._attach()
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        if self.running:
            self.costs.greedy_share = sum(map(_is_greedy, self.running)) / len(self.running)
        self._plan = self._next_plan(len(decoding))
        self._groups.want(self._plan.groups)
        held: set[str] = set()
        if self._pause_state == PauseState.UNPAUSED:
            held = {*self.book.pending, *self._groups.others()}
        for request in self.running:
            request.next_decode_eligible_step = sys.maxsize if request.request_id in held else 0
        verified = [request for request in decoding if request.request_id not in held]
        self._fall_back(verified)
        output = super().schedule(throttle_prefills)
        # The worker ships features before the outcome is known here: it has to know now for whom and how much to ask.
        output.draft_k = 0 if self._plan.outcomes else self._plan.remote_k
        output.hurried = self._plan.remote_k > 0 or self.planner.calls_drafters
        output.undrafted = self._needs_no_drafter(verified) if output.draft_k else frozenset()
        self._step = StepShape.of(output, frozenset(request.request_id for request in decoding))
        return output

    def _next_plan(self, requests: int) -> Plan:
        if not self._drafter_ids:
            return self._alone
        self.costs.lookups = self.fallback.in_general(self.costs.greedy_share)
        changes = self.planner.changes
        plan = self.planner.plan(requests)
        if self.planner.changes != changes:
            logger.info("%s", self.planner.decision)
            if self.records is not None and self.planner.decision is not None:
                self.records.decided(self.planner.decision)
        return plan

    def _fall_back(self, requests: list[Any]) -> None:
        """Gives those without a draft one of our own, where that is expected to pay."""
        self.fallback.begin_step()
        self._untold.clear()
        k = self._plan.k
        bare = [request for request in requests if not request.spec_token_ids]
        if not (k and bare) or self.counters is None:
            return
        price = self.costs.verify_s(len(requests), k) / self.costs.verify_s(len(requests), 0)
        for request in bare:
            tokens = self.fallback.draft(request.request_id, request.num_tokens, k, price)
            if tokens:
                self._give(request, Usable(request.request_id, FALLBACK, request.num_tokens, tokens))
                self._untold.add(request.request_id)

    def _needs_no_drafter(self, requests: list[Any]) -> frozenset[str]:
        """Those of the requests verified now whose own text is to draft for them next."""
        n, k, costs = len(requests), self._plan.k, self.costs
        step_s = costs.verify_s(n, k)
        wait_s = costs.draft_s(n, k) if self._plan.groups == 1 else max(costs.draft_s(n, k) - step_s, 0.0)
        return self.fallback.preferred([request.request_id for request in requests], k, step_s, wait_s)

    def _give(self, request: Any, draft: Usable) -> None:
        super().update_draft_token_ids(DraftTokenIds([draft.request_id], [draft.tokens]))
        self._verifying[request.request_id] = draft

    def make_up_drafts(self, k: int) -> None:
        """Gives every request that decodes `k` draft tokens of no meaning, to see what verifying them takes."""
        ids = [request.request_id for request in self.running if not request.is_prefill_chunk]
        super().update_draft_token_ids(DraftTokenIds(ids, [[0] * k for _ in ids]))

    def _attach(self) -> None:
        ready, expired = self.book.collect(time.monotonic())
        for draft in ready:
            request = self.requests.get(draft.request_id)
            if request is None or request.num_tokens != draft.base_len:
                self._drop(draft.drafter_id, "stale")
                continue
            self._give(request, draft)
        for request_id in expired:
            self._drop(drafter_for(request_id, self._drafter_ids) or "none", "lost")

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """vLLM offers its own proposer's (empty) drafts after each step; they must not replace those that arrive."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method of the same name; afterwards the requests that go on expect their next drafts."""
        plan = self._plan
        lengths = {}
        if plan.outcomes:
            lengths = {r: self.requests[r].num_tokens for r in scheduler_output.num_scheduled_tokens if r in self.requests}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        now = time.monotonic()
        if len(self._groups) > 1 and any(r in self._groups.present() for r in scheduler_output.num_scheduled_tokens):
            self._groups.stepped()
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            self._groups.add(request_id)
            if not plan.k:
                continue
            self.fallback.advance(request_id, request.all_token_ids, _is_greedy(request))
            chosen = drafter_for(request_id, self._drafter_ids)
            if chosen is None or request_id in scheduler_output.undrafted:
                continue
            if scheduler_output.draft_k:
                self.book.expect(request_id, request.num_tokens, chosen, now)
            elif plan.outcomes:
                began = lengths.get(request_id, request.num_tokens - 1)
                if request_id in self._untold and request.num_tokens - began > 1:
                    began = -1
                self.ahead.ended(Ended(request_id, began, request.num_tokens, request.all_token_ids[-1]))
        return outputs

    def settle(self, now: float) -> dict[str, list[NextItem]]:
        """Mode `ahead`: decides the next draft of every verification that has ended; returns what to ask each drafter.

        A hit is used at once, and so is the request's own text where it does better.  A miss is drafted afresh, and waited for
        only where that pays.
        """
        asks: dict[str, list[NextItem]] = {}
        hits = misses = 0
        for ended, tokens in self.ahead.settle(self.book.vocab_size):
            drafter_id = drafter_for(ended.request_id, self._drafter_ids)
            if drafter_id is None or self.counters is None:
                continue
            counters, k = self.counters.drafter(drafter_id), self._plan.k
            tokens = tokens[:k]
            counters.ahead_hits += bool(tokens)
            counters.ahead_misses += not tokens
            own = self.fallback.better(ended.request_id, ended.base_len, k, GAIN if tokens else 1.0)
            source, tokens = (FALLBACK, own) if own else (drafter_id, tokens)
            if tokens:
                hits += 1
                self.book.give(Usable(ended.request_id, source, ended.base_len, tokens, ahead=True))
            else:
                misses += 1
                self.book.expect(ended.request_id, ended.base_len, drafter_id, now)
            item = NextItem(ended.request_id, ended.base_len, self._plan.k, tokens, self._plan.outcomes)
            asks.setdefault(drafter_id, []).append(item)
        self.costs.ahead_hit_rate = self.ahead.hit_rate
        if hits and misses and not self._waiting_pays(hits, misses):
            self.book.stop_waiting()
        return asks

    def _waiting_pays(self, hits: int, misses: int) -> bool:
        k = self._plan.k
        step_s, draft_s = self.costs.verify_s(hits + misses, k), self.costs.draft_s(misses, k)
        return worth_waiting(hits, misses, step_s, draft_s, self.costs.length_after_miss(k))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.book.forget(request.request_id)
        self.ahead.forget(request.request_id)
        self._groups.remove(request.request_id)
        request.next_decode_eligible_step = 0
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.book.forget(request.request_id)
        self.ahead.forget(request.request_id)
        self.fallback.forget(request.request_id)
        self._groups.remove(request.request_id)
        self._verifying.pop(request.request_id, None)
        self._draft_s.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _drop(self, drafter_id: str, reason: str) -> None:
        if self.counters is not None:
            self.counters.dropped(drafter_id, reason)


def _is_greedy(request: Any) -> bool:
    return request.sampling_params is not None and request.sampling_params.sampling_type == SamplingType.GREEDY
