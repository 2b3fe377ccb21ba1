"""Counts what a verifier does, in every mode alike.  Engine process, engine thread.

`Counters` owns the cumulative `VerifierStats`.  `CountingScheduler` is mixed into vLLM's scheduler and reads each step's
outcome where vLLM itself decides it, so that plain, native and remote decoding are measured with the same code.
"""

from __future__ import annotations

import time
from typing import Any

from backend.fleet import DraftCounters, VerifierStats


class Counters:
    """The verifier's counters; busy + idle = wall."""

    def __init__(self, stats: VerifierStats) -> None:
        self.stats = stats

    def drafter(self, drafter_id: str) -> DraftCounters:
        """The counters of one drafter, made when first asked for."""
        return self.stats.drafters.setdefault(drafter_id, DraftCounters())

    def verification(self, drafter_id: str, drafted: int, accepted: int) -> None:
        """One drafted verification: `accepted` of `drafted` tokens were kept."""
        counters = self.drafter(drafter_id)
        counters.drafts += 1
        counters.draft_tokens += drafted
        counters.accepted_tokens += accepted
        for by_position, n in ((counters.drafted_by_position, drafted), (counters.accepted_by_position, accepted)):
            by_position.extend([0] * (drafted - len(by_position)))
            for position in range(n):
                by_position[position] += 1

    def dropped(self, drafter_id: str, reason: str, n: int = 1) -> None:
        """Drafts of `drafter_id` that could not be used."""
        dropped = self.drafter(drafter_id).dropped
        dropped[reason] = dropped.get(reason, 0) + n

    def step(self, busy_s: float, verify_s: float) -> None:
        """One engine step took `busy_s`, of which the target's forward and sampling `verify_s`."""
        self.stats.steps += 1
        self.stats.busy_s += busy_s
        self.stats.verify_s += verify_s

    def busy(self, seconds: float) -> None:
        """Work outside of steps: messages, bookkeeping."""
        self.stats.busy_s += seconds

    def idle(self, cause: str, seconds: float) -> None:
        """The engine could have computed and did not."""
        self.stats.idle_s[cause] = self.stats.idle_s.get(cause, 0.0) + seconds


class CountingScheduler:
    """Mixin over a vLLM scheduler."""

    counters: Counters | None = None
    source_name: str = "native"
    _scheduled_at: float = 0.0
    _verify_s: float = 0.0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """vLLM's method of the same name; between its end and the outcome lies the target's own work."""
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        # A request that another verifier has begun enters the batch with output; see `runner.ResumedOutputs`.
        requests: Any = self.requests  # type: ignore[attr-defined]
        output.resumed_outputs = {
            new.req_id: list(requests[new.req_id].output_token_ids)
            for new in output.scheduled_new_reqs
            if requests[new.req_id].num_output_tokens
        }
        self._scheduled_at = time.monotonic()
        return output

    def take_verify_s(self) -> float:
        """Seconds of target forward and sampling since the last call."""
        taken, self._verify_s = self._verify_s, 0.0
        return taken

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's method of the same name."""
        self._verify_s += time.monotonic() - self._scheduled_at
        counters = self.counters
        if counters is not None:
            self._count_verifications(counters, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if counters is not None:
            self._count_outputs(counters.stats, outputs)
        return outputs

    def note_verification(self, counters: Counters, request_id: str, drafted: int, accepted: int) -> None:
        """One drafted verification of this step."""
        counters.verification(self.source_name, drafted, accepted)

    def note_step(self, seconds: float) -> None:
        """The step that just ended took so long, bookkeeping and sending included."""

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        if self.counters is not None:
            self.counters.stats.preemptions += 1
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _count_verifications(self, counters: Counters, scheduler_output: Any, model_runner_output: Any) -> None:
        sampled = model_runner_output.sampled_token_ids
        index = model_runner_output.req_id_to_index
        stats = counters.stats
        for request_id in scheduler_output.num_scheduled_tokens:
            row = index.get(request_id)
            tokens = sampled[row] if sampled and row is not None else []
            if not tokens or request_id not in self.requests:  # type: ignore[attr-defined]
                continue
            stats.verifications += 1
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
            drafted = sum(token >= 0 for token in drafts)
            if drafted:
                self.note_verification(counters, request_id, drafted, len(tokens) - 1)

    def _count_outputs(self, stats: VerifierStats, outputs: Any) -> None:
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                stats.tokens += len(output.new_token_ids)
                if output.prefill_stats is not None:
                    stats.prompt_tokens += output.prefill_stats.num_prompt_tokens
                if output.finish_reason is not None:
                    reason = str(output.finish_reason)
                    stats.requests_finished[reason] = stats.requests_finished.get(reason, 0) + 1

    def read_load(self, stats: VerifierStats) -> None:
        """Puts the present load into `stats`."""
        scheduler: Any = self
        stats.running, stats.waiting = scheduler.get_request_counts()
        stats.kv_usage = scheduler.get_kv_cache_usage()
        stats.tokens_in_flight = sum(request.num_tokens for request in scheduler.requests.values())
