"""Makes a verifier's records: rows of steps, verifications, requests and decisions.  Engine process, engine thread.

In each step, `ran` follows the target's outcome, `verified` follows vLLM's decision on what the client gets, and `stepped`
follows the loop's count of the step's time.  Times are differences of `VerifierStats`, so rows add up to the counters.
"""

import time
from collections.abc import Callable
from typing import Any

from backend.engine.observers import Observer, Verification
from backend.engine.worker.fixed import fixed_response
from backend.fleet import VerifierStats
from backend.records.rows import DecisionRow, RequestRow, Row, StepRow, VerificationRow, name_for_records
from backend.speculation.waiting import Choice, Plan, StepLoad


class Recording(Observer):
    """The rows of one incarnation of a verifier.

    `put` gets the rows in order of events: a step's verifications and requests come before the step.  `put` must return at
    once: no file, no socket, no waiting, no lock that is held for long.
    """

    def __init__(self, put: Callable[[Row], None], stats: VerifierStats) -> None:
        """`stats`: the counters of the time before, which no row contains."""
        self.put = put
        self._requests: dict[str, RequestRow] = {}
        """Rows of requests that have not ended, as far as they have come."""
        self._steps = stats.steps
        self._began_s: float | None = None
        self._await_step(stats)

    def _await_step(self, stats: VerifierStats) -> None:
        self._busy_s, self._verify_s, self._idle_s = stats.busy_s, stats.verify_s, dict(stats.idle_s)
        self._ran = False
        self._now = 0.0
        self._prefill, self._draft_s = 0, 0.0
        self._verified: list[VerificationRow] = []

    # -- requests ------------------------------------------------------------------------------------------------------

    def began(self, request: Any) -> None:
        params = request.sampling_params
        self._requests[request.request_id] = RequestRow(
            name_for_records(request.request_id, params.extra_args if params is not None else None),
            request.arrival_time,
            first_token_at=0.0,
            ended_at=0.0,
            prompt_tokens=request.num_prompt_tokens,
            tokens=0,
            verifications=0,
            draft_tokens=0,
            accepted=0,
            finish_reason="",
            teacher_forced=fixed_response(params) is not None,
            brought_tokens=request.num_output_tokens,
        )

    def ended(self, request: Any, reason: str) -> None:
        row = self._requests.pop(request.request_id, None)
        if row is not None:
            row.ended_at, row.finish_reason = time.time(), reason
            self.put(row)

    # -- one step ------------------------------------------------------------------------------------------------------

    def ran(self, prefilled: int) -> None:
        self._ran = True
        self._prefill += prefilled
        self._now = time.time()

    def verified(self, verification: Verification, tokens: int, waited_s: float) -> None:
        running, base_len, drafted, accepted, by = verification
        self._draft_s = max(self._draft_s, by.draft_s)
        request = self._requests.get(running.request_id)
        if request is None:
            return
        if not request.tokens:
            request.first_token_at = self._now
        request.tokens += tokens
        request.verifications += 1
        request.draft_tokens += drafted
        request.accepted += accepted if drafted else 0
        name, is_forced = request.request_id, request.teacher_forced
        row = VerificationRow(self._steps, name, base_len, drafted, accepted, tokens, by.drafter_id, by.ahead, is_forced)
        self._verified.append(row)
        self.put(row)

    def stepped(self, scheduler: Any, seconds: float) -> None:
        """Makes the step's row, if the target ran."""
        if not self._ran:
            return
        stats: VerifierStats = scheduler.counters.stats
        plan: Plan = scheduler.plan_in_force()
        began_s = stats.busy_s + sum(stats.idle_s.values()) - seconds
        before, drafted = self._idle_s, [each for each in self._verified if each.draft_tokens]
        idle_ms = {cause: 1e3 * (idle - before[cause]) for cause, idle in stats.idle_s.items() if idle != before[cause]}
        row = StepRow(
            step=self._steps,
            began_at=time.time() - seconds,
            interval_ms=1e3 * (began_s - self._began_s) if self._began_s is not None else 0.0,
            requests=len(self._verified),
            prefill_tokens=self._prefill,
            tokens=sum(each.tokens for each in self._verified),
            drafted=len(drafted),
            drafted_tokens=sum(each.tokens for each in drafted),
            plan_k=plan.k,
            plan_outcomes=plan.outcomes,
            draft_ms=1e3 * self._draft_s,
            verify_ms=1e3 * (stats.verify_s - self._verify_s),
            busy_ms=1e3 * (stats.busy_s - self._busy_s),
            idle_ms=idle_ms,
            waiting=scheduler.get_request_counts()[1],
            kv_usage=scheduler.get_kv_cache_usage(),
        )
        self.put(row)
        self._steps += 1
        self._began_s = began_s
        self._await_step(stats)

    def decided(self, plan: Plan, load: StepLoad, choice: Choice, plain_step_s: float) -> None:
        prospect = load.drafted if plan.k else load.alone
        row = DecisionRow(
            step=self._steps,
            at=time.time(),
            requests=load.requests,
            plan_k=plan.k,
            plan_outcomes=plan.outcomes,
            tokens_per_s=choice.tokens_per_s,
            verify_s=plain_step_s,
            drafted_tokens=prospect.tokens[plan.k or -1],
            acceptance_length=1 + prospect.gains[plan.k or -1],
            hit_rate=load.foresight.rate(plan.outcomes, prospect.tokens[plan.k or -1]),
        )
        self.put(row)
