"""Counts a verifier's steps, verifications and tokens.  Engine process, engine thread.

`Counters` owns the cumulative `VerifierStats`.  `CountingScheduler`, a mixin over vLLM's scheduler, reads each step's outcome
where vLLM decides it.  So all modes are measured with the same code.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backend.engine.observers import UNDRAFTED, Accounts, DraftOrigin, Observer, Verification
from backend.engine.recording import Recording
from backend.engine.worker.fixed import fixed_response
from backend.fleet import VERSIONS, DraftCounters, Verified, VerifierStats
from backend.fleet.speed import Line
from backend.records.rows import Row
from backend.speculation.pairing import Pairing
from backend.speculation.proposals import Proposal
from backend.speculation.waiting import Plan


@dataclass(frozen=True)
class StepOrders:
    """What our scheduler tells our runner with a step: attribute `outrider` of vLLM's `SchedulerOutput`."""

    resumed: dict[str, list[int]]
    """Output tokens of requests that another verifier has begun (`runner.ResumedOutputs`)."""
    features_needed: bool
    """Whether drafters need this step's features at once."""
    pairings: dict[str, Pairing] = field(default_factory=dict)
    """The pairing of each new request."""
    asks: dict[str, tuple[int, float]] = field(default_factory=dict)
    """See `Attached`."""
    chance_weights: dict[str, list[list[float]]] = field(default_factory=dict)
    """By drafter: what these drafts are judged by (`Next.chance_weights`)."""
    proposals: dict[str, Proposal] = field(default_factory=dict)
    """What the sampled drafts of this step were drawn from."""
    is_early: bool = False
    """Whether the step begins before the outcome of the one before is known (`early.py`)."""
    settled: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    """In the first step that does not begin early again: each request's number of output tokens, and the last of them."""


class Counters:
    """The verifier's counters; busy + idle = wall time."""

    def __init__(self, stats: VerifierStats) -> None:
        self.stats = stats
        self.line = Line()

    def drafter(self, drafter_id: str) -> DraftCounters:
        """One drafter's counters, created at the first call."""
        return self.stats.drafters.setdefault(drafter_id, DraftCounters())

    def verification(self, drafter_id: str, drafted: int, accepted: int, teacher_forced: bool = False) -> None:
        """Counts a drafted verification.  Fixed responses have separate counters."""
        counters = self.stats.teacher_forced if teacher_forced else self.drafter(drafter_id)
        for each in (counters, self._of_version(counters)):
            each.drafts += 1
            each.draft_tokens += drafted
            each.accepted_tokens += accepted
        for by_position, n in ((counters.drafted_by_position, drafted), (counters.accepted_by_position, accepted)):
            by_position.extend([0] * (drafted - len(by_position)))
            for position in range(n):
                by_position[position] += 1

    def _of_version(self, counters: DraftCounters) -> Verified:
        """The counters for the current weights, in place of the oldest if needed."""
        by_version, version = counters.by_version, self.stats.weights.version
        if version not in by_version and len(by_version) == VERSIONS:
            del by_version[next(iter(by_version))]
        return by_version.setdefault(version, Verified())

    def dropped(self, drafter_id: str, reason: str, n: int = 1) -> None:
        """Counts drafts of `drafter_id` that could not be used."""
        dropped = self.drafter(drafter_id).dropped
        dropped[reason] = dropped.get(reason, 0) + n


class CountingScheduler:
    """Mixin over a vLLM scheduler that counts, and tells the observers of requests and steps."""

    source_name: str = "native"
    """The drafter's name in the counters for drafts made by vLLM itself."""
    _scheduled_at: float = 0.0
    _requests_in_step: int = 0
    _prefill_tokens: int = 0
    _awaited_s: float = 0.0
    """Total seconds that steps have waited for drafts."""
    _spent_s: float = 0.0
    """Total seconds of work and of waiting for drafts, until the last step ended or there was nothing to do."""
    _between_s: float = 0.0
    """Seconds between the last step and the one before it: waiting for drafts, and work meanwhile."""
    _emitted: int = 0
    """Tokens emitted since the last step that was noted."""
    features_needed: bool = True
    is_early: bool = False
    """See `StepOrders`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counters = Counters(VerifierStats("", 0.0, "off", 0))
        """Counters of the warm-up; `VerifierProcess` replaces them."""
        self.accounts = Accounts()
        self.observers: list[Observer] = [self.accounts]
        self._verified: dict[str, Verification] = {}
        """What the target made of each request in the step whose outcome is known."""
        self._freed: dict[str, Any] = {}
        """Requests that vLLM has freed and that are not counted as ended yet."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's method of the same name; from its end to `update_from_output` the target computes."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        # A request that another verifier has begun enters the batch with output tokens; see `runner.ResumedOutputs`.
        requests: Any = self.requests  # type: ignore[attr-defined]
        new = [requests[each.req_id] for each in output.scheduled_new_reqs]
        resumed = {each.request_id: list(each.output_token_ids) for each in new if each.num_output_tokens}
        output.outrider = StepOrders(resumed, self.features_needed, is_early=self.is_early)
        self.counters.stats.resumed += len(resumed)
        for request in new:
            for observer in self.observers:
                observer.scheduled(request)
        self._scheduled_at = time.monotonic()
        return output

    def record_to(self, put: Callable[[Row], None] | None) -> None:
        """Makes rows for `put` from now on, or none.  The first ones leave out requests that run already."""
        recording = next((each for each in self.observers if isinstance(each, Recording)), None)
        if recording is None and put is not None:
            self.observers.append(Recording(put, self.counters.stats))
        elif recording is not None and put is not None:
            recording.put = put
        elif recording is not None:
            self.observers.remove(recording)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method of the same name."""
        self.counters.stats.verify_s += time.monotonic() - self._scheduled_at
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        self._requests_in_step = len(scheduled)
        self._prefill_tokens = sum(max(0, n - 1 - len(drafts.get(request_id, ()))) for request_id, n in scheduled.items())
        self._count_verifications(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._count_outputs(self.counters.stats, outputs)
        return outputs

    def add_request(self, request: Any) -> None:
        """vLLM's method of the same name."""
        for observer in self.observers if request.request_id not in self.requests else ():  # type: ignore[attr-defined]
            observer.began(request)
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """vLLM's method of the same name, for requests that do not end by their own tokens."""
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._count_ended(request.request_id, str(request.get_finished_reason()))
        return ended

    def drafted_by(self, request: Any) -> DraftOrigin:
        """Where the draft came from that the last step verified for a request."""
        return DraftOrigin(self.source_name)

    def plan_in_force(self) -> Plan:
        """What drafters are currently asked for."""
        return Plan(self.num_spec_tokens)  # type: ignore[attr-defined]

    def count_step(self, seconds: float, *, ran: bool) -> None:
        """Counts and records the step that just ended; `seconds` includes bookkeeping and sending.

        Only a step that `ran` the target counts: vLLM also steps when it can schedule nothing.
        """
        self.counters.stats.busy_s += seconds
        if ran:
            self.counters.stats.steps += 1
            self.note_step(seconds)
        for observer in self.observers:
            observer.stepped(self, seconds)

    def rested(self) -> None:
        """There was nothing to do, or weights were exchanged: what was done since the last step lies between no two steps."""
        self._spent_s = self.counters.stats.busy_s + self.counters.stats.idle_s["awaiting_draft"]

    def note_step(self, seconds: float) -> None:
        """Learns the duration of a step that ran the target."""
        stats = self.counters.stats
        awaited_s, emitted = stats.idle_s["awaiting_draft"], self._emitted
        spent_s = stats.busy_s + awaited_s
        self._between_s = spent_s - self._spent_s - seconds
        self._spent_s, self._awaited_s, self._emitted = spent_s, awaited_s, 0
        if self._prefill_tokens:
            stats.prefill_tokens += self._prefill_tokens
            stats.prefill_s += seconds
        else:
            self.counters.line.note(self._requests_in_step, seconds + self._between_s, emitted)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.counters.stats.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _count_verifications(self, scheduler_output: Any, model_runner_output: Any) -> None:
        sampled = model_runner_output.sampled_token_ids
        index = model_runner_output.req_id_to_index
        stats, prefilled = self.counters.stats, 0
        self._verified = {}
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if request is None:
                continue
            base_len = request.num_tokens
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            prefilled += scheduled if base_len == request.num_prompt_tokens else scheduled - 1 - len(drafts)
            row = index.get(request_id)
            tokens = sampled[row] if sampled and row is not None else []
            if not tokens:
                continue
            stats.verifications += 1
            drafted, accepted = len(drafts) - drafts.count(-1), len(tokens) - 1
            by = self.drafted_by(request) if drafted else UNDRAFTED
            if by is not UNDRAFTED:
                is_forced = fixed_response(request.sampling_params) is not None
                self.counters.verification(by.drafter_id, drafted, accepted, is_forced)
            self._verified[request_id] = Verification(request, base_len, drafted, accepted, by)
        for observer in self.observers if scheduler_output.num_scheduled_tokens else ():
            observer.ran(prefilled)

    def _count_outputs(self, stats: VerifierStats, outputs: Any) -> None:
        waited_s = stats.idle_s["awaiting_draft"] - self._awaited_s
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if tokens := len(output.new_token_ids):
                    stats.tokens += tokens
                    self._emitted += tokens
                    verification = self._verified[output.request_id]
                    for observer in self.observers:
                        observer.verified(verification, tokens, waited_s)
                if output.prefill_stats is not None:
                    stats.prompt_tokens += output.prefill_stats.num_prompt_tokens
                    stats.cached_tokens += output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self._count_ended(output.request_id, str(output.finish_reason))

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._freed[request.request_id] = request
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _count_ended(self, request_id: str, reason: str) -> None:
        request = self._freed.pop(request_id, None)
        if request is not None:
            finished = self.counters.stats.requests_finished
            finished[reason] = finished.get(reason, 0) + 1
            for observer in self.observers:
                observer.ended(request, reason)

    def read_load(self, stats: VerifierStats) -> None:
        """Writes the current load and speed into `stats`."""
        scheduler: Any = self
        stats.speed = self.counters.line.read()
        stats.running, stats.waiting = scheduler.get_request_counts()
        stats.kv_usage = scheduler.get_kv_cache_usage()
        stats.tokens_in_flight = sum(request.num_tokens for request in scheduler.requests.values())
