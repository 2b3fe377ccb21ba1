"""Makes a verifier's records: rows of steps, verifications, requests and decisions.  Engine process, engine thread.

`counting.CountingScheduler` calls the methods in the order of events.  `began` is called once per request.  In each step,
`prefilled` follows the target's outcome, `verified` follows vLLM's decision on what the client gets, and `stepped` follows the
loop's count of the step's time.  Times are differences of `VerifierStats`, so rows add up to the counters.
"""

import time
from collections.abc import Callable
from typing import Any

from backend.engine.accounts import Verification
from backend.engine.worker.fixed import fixed_response
from backend.fleet import VerifierStats
from backend.records.rows import DecisionRow, RequestRow, Row, StepRow, VerificationRow, name_for_records
from backend.speculation.waiting import Choice, Plan, StepLoad


class Recording:
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
        """Notes a request that vLLM's scheduler has taken in."""
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

    def ended(self, request_id: str, reason: str) -> None:
        """Makes the row of a request that has finished or was aborted."""
        row = self._requests.pop(request_id, None)
        if row is not None:
            row.ended_at, row.finish_reason = time.time(), reason
            self.put(row)

    # -- one step ------------------------------------------------------------------------------------------------------

    def prefilled(self, tokens: int) -> None:
        """Notes that the step has run and computed `tokens` prompt tokens."""
        self._ran = True
        self._prefill += tokens
        self._now = time.time()

    def verified(self, request_id: str, verification: Verification, tokens: int) -> None:
        """Makes the row of a verification of which `tokens` tokens go to the client."""
        self._draft_s = max(self._draft_s, verification.by.draft_s)
        request = self._requests.get(request_id)
        if request is None:
            return
        base_len, drafted, accepted, by = verification
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

    def stepped(self, stats: VerifierStats, seconds: float, plan: Plan, waiting: int, kv_usage: float) -> None:
        """Makes the row of a step of `seconds` that followed `plan`; does nothing if the target did not run."""
        if not self._ran:
            return
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
            waiting=waiting,
            kv_usage=kv_usage,
        )
        self.put(row)
        self._steps += 1
        self._began_s = began_s
        self._await_step(stats)

    def decided(self, plan: Plan, load: StepLoad, choice: Choice, plain_step_s: float) -> None:
        """Makes the row of a decision: mode `auto` changes its plan.  `load` holds what it expects of drafts."""
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
