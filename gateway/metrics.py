"""The gateway's Prometheus metrics.  `DEFINITIONS` describes each one; a test compares it with the documentation.

Metrics have two sources: this gateway's own observations (`GatewayMetrics`), and the members' reports
(`gateway.fleet_metrics`).  Both use a registry of our own, because vLLM's loggers unregister collectors in the default one.
Everything runs in the event loop.
"""

from __future__ import annotations

from collections import Counter as TotalBy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from gateway.in_flight import Cut, InFlight, MoveKind


class Definition(NamedTuple):
    """One metric as it is exposed."""

    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    field: str = ""
    """Of what members report (`backend.fleet.stats`), by the labels of a verifier, of a pair, or of a drafter that learns.

    Without any of these labels, a counter of verifiers or of pairs is summed over the fleet.
    """


_VERIFIER = ("verifier",)
_PAIR = ("verifier", "drafter")
_DRAFTER = ("drafter",)

DEFINITIONS: dict[str, Definition] = {
    # What this gateway saw
    "outrider_requests_total": Definition(
        "counter", ("route", "code"), "HTTP requests by route and status; 499: the client left first"
    ),
    "outrider_requests_in_flight": Definition("gauge", (), "generation requests being served"),
    "outrider_client_disconnects_total": Definition("counter", (), "generation requests whose client left early"),
    "outrider_sequences_finished_total": Definition(
        "counter", ("reason",), "sequences by how they ended: vLLM's reasons, `aborted` by this gateway, `lost` or `poisoned`"
    ),
    "outrider_failovers_total": Definition(
        "counter",
        ("cause",),
        "sequences that went on at another verifier after theirs was lost: `disconnected`, `silent`, `declared_lost` by the "
        "coordinator, `restarted`, `forgotten` there, `given_up` there, `incompatible`",
    ),
    "outrider_migrations_total": Definition(
        "counter", ("cause",), "running sequences moved to another verifier on purpose, by what asked for it"
    ),
    "outrider_poisoned_total": Definition(
        "counter", (), "sequences refused because verifiers were lost one after the other while serving them"
    ),
    "outrider_recovery_seconds": Definition(
        "histogram",
        ("kind",),
        "time without tokens of a sequence that was moved: from its last token before (or from the cut, where there was none) "
        "to its next one; kind is `failover` or `migration`",
    ),
    "outrider_batch_lines_total": Definition("counter", ("status",), "lines of batches carried out, by HTTP status"),
    "outrider_batch_sequences": Definition(
        "gauge", ("state",), "sequences of batches: `running` at verifiers, or `held` while others are served"
    ),
    "outrider_sequences_without_verifier": Definition(
        "gauge", (), "sequences that have lost their verifier and wait for another to be ready"
    ),
    "outrider_queue_sequences": Definition("gauge", (), "sequences that wait at this gateway for room at a verifier"),
    "outrider_queue_tokens": Definition("gauge", (), "their tokens, prompts and expected outputs"),
    "outrider_shed_total": Definition(
        "counter", (), "requests answered 503 because they waited too long for room, would have, or the queue was full"
    ),
    "outrider_prompt_tokens_total": Definition("counter", (), "prompt tokens of sequences that got a first token"),
    "outrider_generated_tokens_total": Definition("counter", (), "tokens of answers, as their usage counts them"),
    "outrider_time_to_first_token_seconds": Definition("histogram", (), "from a request's arrival to its first token"),
    "outrider_inter_chunk_seconds": Definition(
        "histogram", (), "between two chunks of one sequence; a chunk is what one verification emitted"
    ),
    "outrider_tgs_decode": Definition(
        "histogram", (), "tokens per second of one sequence: (n - 1) / (last token - first token)"
    ),
    "outrider_tgs_e2e": Definition("histogram", (), "tokens per second of one sequence: n / (last token - arrival)"),
    # The fleet
    "outrider_fleet_members": Definition("gauge", ("kind", "state"), "members the directory knows"),
    "outrider_operations": Definition(
        "gauge", ("kind", "state"), "administrative operations by kind and state; ended ones are kept for a while"
    ),
    "outrider_verifiers_connected": Definition("gauge", (), "verifiers that answer this gateway"),
    "outrider_verifier_info": Definition("gauge", (*_VERIFIER, "model", "mode", "node"), "1 per verifier that is not lost"),
    "outrider_connections_refused_total": Definition(
        "counter", ("member",), "connections to a verifier's or drafter's tcp socket without this fleet's keys"
    ),
    # What verifiers report
    "outrider_drafts_total": Definition("counter", _PAIR, "verifications that had at least one draft token", "drafts"),
    "outrider_draft_tokens_total": Definition("counter", _PAIR, "draft tokens verified", "draft_tokens"),
    "outrider_accepted_tokens_total": Definition("counter", _PAIR, "draft tokens kept", "accepted_tokens"),
    "outrider_draft_tokens_by_position_total": Definition(
        "counter", (*_PAIR, "position"), "draft tokens verified at each position, from 0", "drafted_by_position"
    ),
    "outrider_accepted_tokens_by_position_total": Definition(
        "counter", (*_PAIR, "position"), "draft tokens kept at each position, from 0", "accepted_by_position"
    ),
    "outrider_drafts_by_version_total": Definition(
        "counter",
        (*_PAIR, "version"),
        "drafted verifications, by the version of the target's weights; the newest four",
        "by_version.drafts",
    ),
    "outrider_draft_tokens_by_version_total": Definition(
        "counter", (*_PAIR, "version"), "draft tokens verified by them", "by_version.draft_tokens"
    ),
    "outrider_accepted_tokens_by_version_total": Definition(
        "counter", (*_PAIR, "version"), "draft tokens kept by them", "by_version.accepted_tokens"
    ),
    "outrider_acceptance_length": Definition(
        "gauge", _PAIR, "1 + accepted tokens / drafts since the verifier started; absent before the first draft"
    ),
    "outrider_draft_rounds_total": Definition("counter", _PAIR, "draft proposals received", "rounds"),
    "outrider_draft_round_trip_seconds_total": Definition(
        "counter", _PAIR, "time from asking to having the draft, summed over rounds", "round_trip_s"
    ),
    "outrider_draft_compute_seconds_total": Definition(
        "counter", _PAIR, "the drafter's own compute, summed over rounds", "draft_s"
    ),
    "outrider_draft_queue_seconds_total": Definition(
        "counter", _PAIR, "time waiting at the drafter, summed over rounds", "queue_s"
    ),
    "outrider_draft_transfer_seconds_total": Definition(
        "counter",
        _PAIR,
        "round trip less the drafter's compute and queue, summed over rounds that were waited for",
        "transfer_s",
    ),
    "outrider_draft_sent_bytes_total": Definition("counter", _PAIR, "bytes sent to the drafter", "bytes_sent"),
    "outrider_handovers_total": Definition(
        "counter", _PAIR, "running requests given to the drafter with their earlier features", "handovers"
    ),
    "outrider_handover_rows_total": Definition("counter", _PAIR, "those features, in positions", "handover_rows"),
    "outrider_handover_bytes_total": Definition(
        "counter", _PAIR, "those features, in bytes (part of the bytes sent)", "handover_bytes"
    ),
    "outrider_ahead_hits_total": Definition(
        "counter", _PAIR, "draft at hand after a verification, drafting ahead", "ahead_hits"
    ),
    "outrider_ahead_misses_total": Definition(
        "counter", _PAIR, "no draft at hand after a verification, drafting ahead", "ahead_misses"
    ),
    "outrider_drafts_dropped_total": Definition("counter", (*_PAIR, "reason"), "drafts not used, by reason", "dropped"),
    "outrider_drafters_down": Definition("gauge", _VERIFIER, "assigned drafters that are not waited for"),
    # What drafters report
    "outrider_drafter_busy_seconds_total": Definition(
        "counter", _DRAFTER, "time in which the drafter computed; otherwise it is idle", "busy_s"
    ),
    "outrider_drafter_draft_seconds_total": Definition(
        "counter", _DRAFTER, "time of batches that drafted; other busy time reads prompts or drafts ahead", "draft_s"
    ),
    "outrider_drafter_batches_total": Definition("counter", _DRAFTER, "batches that drafted", "batches"),
    "outrider_drafter_drafts_total": Definition("counter", _DRAFTER, "requests drafted for, summed over batches", "drafts"),
    "outrider_drafter_sequences": Definition("gauge", _DRAFTER, "sequences in its KV cache", "sequences"),
    "outrider_drafter_kv_cache_usage": Definition("gauge", _DRAFTER, "share of its KV cache in use, 0 to 1", "cache_usage"),
    "outrider_drafter_evictions_total": Definition(
        "counter", _DRAFTER, "sequences removed from its KV cache to make room", "evictions"
    ),
    "outrider_drafter_rejected_total": Definition(
        "counter", _DRAFTER, "messages refused: undecodable, another version, another width", "rejected"
    ),
    # Those that learn
    "outrider_learning_version": Definition(
        "gauge", _DRAFTER, "version of the drafter's head; 0: the one it began with", "learning.version"
    ),
    "outrider_learning_steps_total": Definition("counter", _DRAFTER, "steps its head was trained for", "learning.steps"),
    "outrider_learning_seconds_total": Definition("counter", _DRAFTER, "time they took", "learning.training_s"),
    "outrider_learning_sequences_total": Definition(
        "counter", _DRAFTER, "sequences put into its replay ring", "learning.sequences"
    ),
    "outrider_learning_sequences_dropped_total": Definition(
        "counter", _DRAFTER, "sequences its writer had no time for", "learning.sequences_dropped"
    ),
    "outrider_learning_published_total": Definition(
        "counter", _DRAFTER, "heads that it has put in place", "learning.published"
    ),
    "outrider_learning_taken_back_total": Definition(
        "counter", _DRAFTER, "heads that it has taken back", "learning.taken_back"
    ),
    "outrider_learning_live_acceptance": Definition(
        "gauge",
        _DRAFTER,
        "share of drafts whose first token was right, lately; a mean over sequences",
        "learning.live_acceptance",
    ),
    "outrider_learning_acceptance_length": Definition(
        "gauge", (*_DRAFTER, "head"), "acceptance length of the `present` head and the `candidate` on held-out sequences"
    ),
    "outrider_verifier_busy_seconds_total": Definition("counter", _VERIFIER, "time in steps; busy + idle = wall", "busy_s"),
    "outrider_verifier_idle_seconds_total": Definition(
        "counter", (*_VERIFIER, "cause"), "time the verifier could have computed but did not, by cause", "idle_s"
    ),
    "outrider_verifier_verify_seconds_total": Definition("counter", _VERIFIER, "target forward and sampling", "verify_s"),
    "outrider_verifier_steps_total": Definition("counter", _VERIFIER, "engine steps", "steps"),
    "outrider_verifier_verifications_total": Definition(
        "counter", _VERIFIER, "sequences verified, summed over steps", "verifications"
    ),
    "outrider_verifier_prompt_tokens_total": Definition(
        "counter", _VERIFIER, "prompt tokens of sequences that began decoding", "prompt_tokens"
    ),
    "outrider_verifier_prefill_tokens_total": Definition(
        "counter", _VERIFIER, "tokens of prompts, and of what moved sequences bring along, that were computed", "prefill_tokens"
    ),
    "outrider_verifier_prefill_seconds_total": Definition("counter", _VERIFIER, "time in steps with prefill", "prefill_s"),
    "outrider_verifier_resumed_total": Definition(
        "counter", _VERIFIER, "sequences that went on here with tokens emitted elsewhere", "resumed"
    ),
    "outrider_verifier_tokens_total": Definition("counter", _VERIFIER, "tokens emitted", "tokens"),
    "outrider_verifier_requests_finished_total": Definition(
        "counter", (*_VERIFIER, "reason"), "sequences finished, by vLLM's finish reason", "requests_finished"
    ),
    "outrider_records_written_total": Definition(
        "counter",
        (*_VERIFIER, "kind"),
        "rows of records written to disk: `step`, `verification`, `request`, `decision`",
        "records_written",
    ),
    "outrider_records_dropped_total": Definition(
        "counter", (*_VERIFIER, "kind"), "rows of records lost: the queue was full, or the disk took no more", "records_dropped"
    ),
    "outrider_verifier_preemptions_total": Definition(
        "counter", _VERIFIER, "sequences preempted for KV cache space", "preemptions"
    ),
    "outrider_verifier_running": Definition("gauge", _VERIFIER, "sequences in the batch", "running"),
    "outrider_verifier_waiting": Definition("gauge", _VERIFIER, "sequences waiting to enter the batch", "waiting"),
    "outrider_verifier_tokens_in_flight": Definition(
        "gauge", _VERIFIER, "tokens of running and waiting sequences", "tokens_in_flight"
    ),
    "outrider_verifier_kv_cache_usage": Definition("gauge", _VERIFIER, "share of the KV cache in use, 0 to 1", "kv_usage"),
    "outrider_verifier_num_speculative_tokens": Definition(
        "gauge", _VERIFIER, "the longest draft, in tokens (K)", "num_speculative_tokens"
    ),
    "outrider_verifier_plan_k": Definition(
        "gauge", _VERIFIER, "draft tokens asked of drafters per request at most, 0 to K; 0: they are not asked", "plan_k"
    ),
    "outrider_verifier_plan_changes_total": Definition(
        "counter", _VERIFIER, "times mode auto has changed between plain steps, drafting, and drafting ahead", "plan_changes"
    ),
    # Draft counters under vLLM's names, summed over the fleet, for vLLM's benchmark client
    "vllm:spec_decode_num_drafts_total": Definition("counter", (), "see outrider_drafts_total", "drafts"),
    "vllm:spec_decode_num_draft_tokens_total": Definition("counter", (), "see outrider_draft_tokens_total", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens_total": Definition(
        "counter", (), "see outrider_accepted_tokens_total", "accepted_tokens"
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": Definition(
        "counter", ("position",), "see outrider_accepted_tokens_by_position_total", "accepted_by_position"
    ),
}

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TGS_BUCKETS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)


class GatewayMetrics:
    """Metrics of this gateway's own observations.  Also the observer of `FleetCore`."""

    def __init__(self) -> None:
        # A gauge with the creation time of each series is useless.  The library can disable it only for the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.fleet = CollectorRegistry()
        """The part of `registry` that is equal for every gateway of the fleet."""
        self.in_flight = 0
        self.moves: TotalBy[tuple[MoveKind, str, str]] = TotalBy()
        """Sequences that went on at another verifier, by kind, cause and new verifier; for the fleet page."""
        self._requests = self._counter("outrider_requests_total")
        self._disconnects = self._counter("outrider_client_disconnects_total")
        self._finished = self._counter("outrider_sequences_finished_total")
        self._failovers = self._counter("outrider_failovers_total")
        self._migrations = self._counter("outrider_migrations_total")
        self._poisoned = self._counter("outrider_poisoned_total")
        self._batch_lines = self._counter("outrider_batch_lines_total")
        self._recovery = self._histogram("outrider_recovery_seconds", _LATENCY_BUCKETS)
        self._prompt_tokens = self._counter("outrider_prompt_tokens_total")
        self._tokens = self._counter("outrider_generated_tokens_total")
        self._first_token = self._histogram("outrider_time_to_first_token_seconds", _LATENCY_BUCKETS)
        self._inter_chunk = self._histogram("outrider_inter_chunk_seconds", _LATENCY_BUCKETS)
        self._tgs_decode = self._histogram("outrider_tgs_decode", _TGS_BUCKETS)
        self._tgs_e2e = self._histogram("outrider_tgs_e2e", _TGS_BUCKETS)
        name = "outrider_requests_in_flight"
        gauge = Gauge(name, DEFINITIONS[name].help, registry=self.registry)
        gauge.set_function(lambda: self.in_flight)

    def _counter(self, name: str) -> Counter:
        definition = DEFINITIONS[name]
        return Counter(name.removesuffix("_total"), definition.help, definition.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        definition = DEFINITIONS[name]
        return Histogram(name, definition.help, definition.labels, registry=self.registry, buckets=buckets)

    @contextmanager
    def one_in_flight(self) -> Iterator[None]:
        """Counts a generation request for as long as the block lasts."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def request_done(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def batch_line(self, status: int) -> None:
        self._batch_lines.labels(str(status)).inc()

    def client_left(self) -> None:
        """Counts a client that closed its connection before its answer was complete."""
        self._disconnects.inc()

    def on_moved(self, sequence: InFlight, cut: Cut) -> None:
        if sequence.link is not None:
            self.moves[cut.kind, cut.cause, sequence.link.member.id] += 1
        (self._failovers if cut.kind == "failover" else self._migrations).labels(cut.cause).inc()

    def on_said(self, count: int) -> None:
        self._tokens.inc(count)

    def on_tokens(self, sequence: InFlight, count: int, now: float) -> None:
        if sequence.cut is not None:
            since = sequence.cut.at if sequence.last_token is None else sequence.last_token
            self._recovery.labels(sequence.cut.kind).observe(now - since)
        if sequence.last_token is None:
            self._prompt_tokens.inc(len(sequence.request.prompt_token_ids or ()))
        if sequence.batched:
            # A batch's sequence gives way to others, so its latencies would distort those of interactive requests.
            return
        if sequence.last_token is None:
            self._first_token.observe(now - sequence.arrived)
        else:
            self._inter_chunk.observe(now - sequence.last_token)

    def on_finished(self, sequence: InFlight, reason: str) -> None:
        self._finished.labels(reason).inc()
        if reason == "poisoned":
            self._poisoned.inc()
        first, last, tokens = sequence.first_token, sequence.last_token, len(sequence.emitted)
        if first is None or last is None or sequence.batched or reason in ("aborted", "lost", "poisoned"):
            return
        if last > first:
            self._tgs_decode.observe((tokens - 1) / (last - first))
        if last > sequence.arrived:
            self._tgs_e2e.observe(tokens / (last - sequence.arrived))
