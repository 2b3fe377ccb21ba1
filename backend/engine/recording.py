"""Makes a verifier's records: rows of steps, verifications, requests and decisions.  Engine process, engine thread.

`counting.CountingScheduler` calls the methods in the order of events.  `began` is called once per request.  In each step,
`verified` and `prefilled` follow the target's outcome, `emitted` follows vLLM's decision on what the client gets, and `stepped`
follows the loop's count of the step's time.  Times are differences of `VerifierStats`, so rows add up to the counters.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from backend.fleet import VerifierStats
from backend.records.rows import DecisionRow, RequestRow, Row, StepRow, VerificationRow
from backend.speculation.waiting import Choice, Plan, StepLoad


@dataclass(slots=True)
class _Request:
    """A request that has not ended."""

    row: RequestRow
    """As far as it has come."""
    outcome: VerificationRow | None = None
    """A verification whose tokens vLLM has not yet cut at the request's stop."""


class Recording:
    """The rows of one incarnation of a verifier.

    `put` gets the rows in order of events: a step's verifications and requests come before the step.  `put` must return at
    once: no file, no socket, no waiting, no lock that is held for long.
    """

    def __init__(self, put: Callable[[Row], None], stats: VerifierStats) -> None:
        """`stats`: the counters of the time before, which no row contains."""
        self.put = put
        self._requests: dict[str, _Request] = {}
        self._steps = stats.steps
        self._began_s: float | None = None
        self._await_step(stats)

    def _await_step(self, stats: VerifierStats) -> None:
        self._busy_s, self._verify_s, self._idle_s = stats.busy_s, stats.verify_s, dict(stats.idle_s)
        self._ran = False
        self._now = 0.0
        self._emitting = self._tokens = self._prefill = self._drafted = self._drafted_tokens = 0
        self._draft_s = 0.0

    # -- requests ------------------------------------------------------------------------------------------------------

    def began(
        self,
        request_id: str,
        name: str,
        arrived_at: float,
        prompt_tokens: int,
        *,
        teacher_forced: bool = False,
        brought_tokens: int = 0,
    ) -> None:
        """Notes a new request; its rows will carry `name`."""
        row = RequestRow(name, arrived_at, 0.0, 0.0, prompt_tokens, 0, 0, 0, 0, "", teacher_forced, brought_tokens)
        self._requests[request_id] = _Request(row)

    def ended(self, request_id: str, reason: str) -> None:
        """Makes the row of a request that has finished or was aborted."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.row.ended_at, request.row.finish_reason = time.time(), reason
            self.put(request.row)

    # -- one step ------------------------------------------------------------------------------------------------------

    def verified(
        self, request_id: str, base_len: int, draft_tokens: int, accepted: int, drafter: str, ahead: bool, draft_s: float = 0.0
    ) -> None:
        """Notes a verification: `accepted` of `draft_tokens` (0: no draft).  `draft_s`: seconds that drafting took."""
        self._draft_s = max(self._draft_s, draft_s)
        request = self._requests.get(request_id)
        if request is not None:
            name, forced = request.row.request_id, request.row.teacher_forced
            request.outcome = VerificationRow(self._steps, name, base_len, draft_tokens, accepted, 0, drafter, ahead, forced)

    def prefilled(self, tokens: int) -> None:
        """Notes that the step has run and computed `tokens` prompt tokens."""
        self._ran = True
        self._prefill += tokens
        self._now = time.time()

    def emitted(self, request_id: str, tokens: int) -> None:
        """Makes the row of a verification of which `tokens` tokens go to the client."""
        request = self._requests.get(request_id)
        if request is None or request.outcome is None or request.outcome.step != self._steps:
            return
        row, request.outcome, whole = replace(request.outcome, tokens=tokens), None, request.row
        if not whole.tokens:
            whole.first_token_at = self._now
        whole.tokens += tokens
        whole.verifications += 1
        self._emitting += 1
        self._tokens += tokens
        if row.draft_tokens:
            whole.draft_tokens += row.draft_tokens
            whole.accepted += row.accepted
            self._drafted += 1
            self._drafted_tokens += tokens
        self.put(row)

    def stepped(self, stats: VerifierStats, seconds: float, plan: Plan, waiting: int, kv_usage: float) -> None:
        """Makes the row of a step of `seconds` that followed `plan`; does nothing if the target did not run."""
        if not self._ran:
            return
        began_s = stats.busy_s + sum(stats.idle_s.values()) - seconds
        before = self._idle_s
        idle_ms = {cause: 1e3 * (idle - before[cause]) for cause, idle in stats.idle_s.items() if idle != before[cause]}
        row = StepRow(
            step=self._steps,
            began_at=time.time() - seconds,
            interval_ms=1e3 * (began_s - self._began_s) if self._began_s is not None else 0.0,
            requests=self._emitting,
            prefill_tokens=self._prefill,
            tokens=self._tokens,
            drafted=self._drafted,
            drafted_tokens=self._drafted_tokens,
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
