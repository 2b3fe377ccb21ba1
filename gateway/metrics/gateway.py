"""The gateway's Prometheus metrics.  `DEFINITIONS` describes each one; a test compares it with the documentation.

Metrics have two sources: this gateway's own observations (`GatewayMetrics`), and the members' reports
(`gateway.metrics.fleet`).  Both use a registry of our own, because vLLM's loggers unregister collectors in the default one.
Everything runs in the event loop.

`FleetCore` calls the methods `on_...` about sequences; `Envelope` (`gateway/http/middleware.py`) counts requests, which it sees
with every error but those of `protocol.py` and of streams that have begun.  A new metric needs its line in
docs/reference/metrics.md and a panel in `dashboards/grafana/dashboards/`; tests fail without them.
"""

from collections import Counter as TotalBy
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from gateway.fleet.sequences import InFlight
from gateway.fleet.statistics import Cut, MoveKind


class Definition(NamedTuple):
    """One metric as it is exposed.  Its name tells the kind, see `kind_of`."""

    help: str
    labels: tuple[str, ...] = ()
    field: str = ""
    """The field of the members' reports (`backend.fleet.stats`); its labels tell whether a verifier's, a pair's or a drafter's.

    Without any of these labels, a counter of verifiers or of pairs is summed over the fleet.
    """
    buckets: tuple[float, ...] = ()
    """A histogram's."""
    known: tuple[str, ...] = ()
    """Values of its label exported as 0 from the start: `increase()` misses the first event of a series that begins with it."""


def _verifier(field: str, help: str, *labels: str) -> Definition:
    return Definition(help, ("verifier", *labels), field)


def _pair(field: str, help: str, *labels: str) -> Definition:
    return Definition(help, ("verifier", "drafter", *labels), field)


def _drafter(field: str, help: str) -> Definition:
    return Definition(help, ("drafter",), field)


_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SPEEDS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)

DEFINITIONS: dict[str, Definition] = {
    # What this gateway saw
    "outrider_requests_total": Definition("HTTP requests by route and status; 499: the client left first", ("route", "code")),
    "outrider_requests_in_flight": Definition("generation requests being served"),
    "outrider_client_disconnects_total": Definition("requests whose client left early"),
    "outrider_sequences_finished_total": Definition(
        "sequences by how they ended: vLLM's reasons, `aborted` by this gateway, `lost` or `poisoned`",
        ("reason",),
        known=("stop", "length", "error", "aborted", "lost", "poisoned"),
    ),
    "outrider_failovers_total": Definition(
        "sequences that went on at another verifier after theirs was lost: `disconnected`, `silent`, `declared_lost` by the "
        "coordinator, `restarted`, `forgotten` there, `given_up` there, `incompatible`",
        ("cause",),
        known=("disconnected", "silent", "declared_lost", "restarted", "forgotten", "given_up", "incompatible"),
    ),
    "outrider_migrations_total": Definition(
        "running sequences moved to another verifier on purpose, by what asked for it", ("cause",), known=("balance", "drain")
    ),
    "outrider_poisoned_total": Definition(
        "sequences refused because verifiers were lost one after the other while serving them"
    ),
    "outrider_recovery_seconds": Definition(
        "time without tokens of a sequence that was moved: from its last token before (or from the cut, where there was none) "
        "to its next one; kind is `failover` or `migration`",
        ("kind",),
        buckets=_LATENCIES,
    ),
    "outrider_batch_lines_total": Definition("lines of batches carried out, by HTTP status", ("status",)),
    "outrider_batch_sequences": Definition(
        "sequences of batches: `running` at verifiers, or `held` while others are served", ("state",)
    ),
    "outrider_sequences_without_verifier": Definition(
        "sequences that have lost their verifier and wait for another to be ready"
    ),
    "outrider_queue_sequences": Definition("sequences that wait at this gateway for room at a verifier"),
    "outrider_queue_tokens": Definition("their tokens, prompts and expected outputs"),
    "outrider_shed_total": Definition(
        "requests answered 503 because they waited too long for room, would have, or the queue was full"
    ),
    "outrider_prompt_tokens_total": Definition("prompt tokens of sequences that got a first token"),
    "outrider_generated_tokens_total": Definition("tokens of answers, as their usage counts them"),
    "outrider_time_to_first_token_seconds": Definition("from a request's arrival to its first token", buckets=_LATENCIES),
    "outrider_inter_chunk_seconds": Definition(
        "between two chunks of one sequence; a chunk is what one verification emitted", buckets=_LATENCIES
    ),
    "outrider_tgs_decode": Definition(
        "tokens per second of one sequence: (n - 1) / (last token - first token)", buckets=_SPEEDS
    ),
    "outrider_tgs_e2e": Definition("tokens per second of one sequence: n / (last token - arrival)", buckets=_SPEEDS),
    # The fleet
    "outrider_fleet_members": Definition("members the directory knows", ("kind", "state")),
    "outrider_operations": Definition(
        "administrative operations by kind and state; ended ones are kept for a while", ("kind", "state")
    ),
    "outrider_verifiers_connected": Definition("verifiers that answer this gateway"),
    "outrider_verifier_info": Definition("1 per verifier that is not lost", ("verifier", "model", "mode", "node")),
    "outrider_connections_refused_total": Definition(
        "connections to a verifier's or drafter's tcp socket without this fleet's keys", ("member",)
    ),
    # What verifiers report
    "outrider_drafts_total": _pair("drafts", "verifications that had at least one draft token"),
    "outrider_draft_tokens_total": _pair("draft_tokens", "draft tokens verified"),
    "outrider_accepted_tokens_total": _pair("accepted_tokens", "draft tokens kept, those behind an answer's end included"),
    "outrider_draft_tokens_by_position_total": _pair(
        "drafted_by_position", "draft tokens verified at each position, from 0", "position"
    ),
    "outrider_accepted_tokens_by_position_total": _pair(
        "accepted_by_position", "draft tokens kept at each position, from 0", "position"
    ),
    "outrider_drafts_by_version_total": _pair(
        "by_version.drafts", "drafted verifications, by the version of the target's weights; the newest four", "version"
    ),
    "outrider_draft_tokens_by_version_total": _pair("by_version.draft_tokens", "draft tokens verified by them", "version"),
    "outrider_accepted_tokens_by_version_total": _pair("by_version.accepted_tokens", "draft tokens kept by them", "version"),
    "outrider_acceptance_length": Definition(
        "1 + accepted tokens / drafts since the verifier started; absent before the first draft", ("verifier", "drafter")
    ),
    "outrider_draft_rounds_total": _pair("rounds", "draft proposals received"),
    "outrider_draft_round_trip_seconds_total": _pair(
        "round_trip_s", "time from asking to having the draft, summed over rounds"
    ),
    "outrider_draft_compute_seconds_total": _pair("draft_s", "the drafter's own compute, summed over rounds"),
    "outrider_draft_queue_seconds_total": _pair("queue_s", "time waiting at the drafter, summed over rounds"),
    "outrider_draft_transfer_seconds_total": _pair(
        "transfer_s", "round trip less the drafter's compute and queue, summed over rounds that were waited for"
    ),
    "outrider_draft_sent_bytes_total": _pair("bytes_sent", "bytes sent to the drafter"),
    "outrider_handovers_total": _pair("handovers", "running requests given to the drafter with their earlier features"),
    "outrider_handover_rows_total": _pair("handover_rows", "those features, in positions"),
    "outrider_handover_bytes_total": _pair("handover_bytes", "those features, in bytes (part of the bytes sent)"),
    "outrider_ahead_hits_total": _pair("ahead_hits", "draft at hand after a verification, drafting ahead"),
    "outrider_ahead_misses_total": _pair("ahead_misses", "no draft at hand after a verification, drafting ahead"),
    "outrider_drafts_dropped_total": _pair("dropped", "drafts not used, by reason", "reason"),
    "outrider_drafters_down": Definition("assigned drafters that are not waited for", ("verifier",)),
    # What drafters report
    "outrider_drafter_busy_seconds_total": _drafter("busy_s", "time in which the drafter computed; otherwise it is idle"),
    "outrider_drafter_draft_seconds_total": _drafter(
        "draft_s", "time of batches that drafted; other busy time reads prompts or drafts ahead"
    ),
    "outrider_drafter_batches_total": _drafter("batches", "batches that drafted"),
    "outrider_drafter_drafts_total": _drafter("drafts", "requests drafted for, summed over batches"),
    "outrider_drafter_sequences": _drafter("sequences", "sequences in its KV cache"),
    "outrider_drafter_kv_cache_usage": _drafter("cache_usage", "share of its KV cache in use, 0 to 1"),
    "outrider_drafter_evictions_total": _drafter("evictions", "sequences removed from its KV cache to make room"),
    "outrider_drafter_rejected_total": _drafter("rejected", "messages refused: undecodable, another version, another width"),
    # Those that learn
    "outrider_learning_version": _drafter("learning.version", "version of the drafter's head; 0: the one it began with"),
    "outrider_learning_steps_total": _drafter("learning.new_steps", "steps its head was trained for"),
    "outrider_learning_seconds_total": _drafter("learning.new_training_s", "time they took"),
    "outrider_learning_sequences_total": _drafter("learning.sequences", "sequences put into its replay ring"),
    "outrider_learning_sequences_dropped_total": _drafter("learning.sequences_dropped", "sequences its writer had no time for"),
    "outrider_learning_published_total": _drafter("learning.published", "heads that it has put in place"),
    "outrider_learning_taken_back_total": _drafter("learning.taken_back", "heads that it has taken back"),
    "outrider_learning_live_acceptance": _drafter(
        "learning.live_acceptance", "share of drafts whose first token was right, lately; a mean over sequences"
    ),
    "outrider_learning_acceptance_length": Definition(
        "acceptance length of the `present` head and the `candidate` on held-out sequences", ("drafter", "head")
    ),
    "outrider_verifier_busy_seconds_total": _verifier("busy_s", "time in steps and other work; busy + idle = wall"),
    "outrider_verifier_idle_seconds_total": _verifier(
        "idle_s", "time the verifier could have computed but did not, by cause", "cause"
    ),
    "outrider_verifier_verify_seconds_total": _verifier("verify_s", "target forward and sampling"),
    "outrider_verifier_steps_total": _verifier("steps", "engine steps"),
    "outrider_verifier_verifications_total": _verifier("verifications", "sequences verified, summed over steps"),
    "outrider_verifier_prompt_tokens_total": _verifier("prompt_tokens", "prompt tokens of sequences that began decoding"),
    "outrider_verifier_prefill_tokens_total": _verifier(
        "prefill_tokens", "tokens of prompts, and of what moved sequences bring along, that were computed"
    ),
    "outrider_verifier_prefill_seconds_total": _verifier("prefill_s", "time in steps with prefill"),
    "outrider_verifier_resumed_total": _verifier("resumed", "sequences that went on here with tokens emitted elsewhere"),
    "outrider_verifier_tokens_total": _verifier("tokens", "tokens emitted"),
    "outrider_verifier_requests_finished_total": _verifier(
        "requests_finished", "sequences finished, by vLLM's finish reason", "reason"
    ),
    "outrider_records_written_total": _verifier(
        "records_written", "rows of records written to disk: `step`, `verification`, `request`, `decision`", "kind"
    ),
    "outrider_records_dropped_total": _verifier(
        "records_dropped", "rows of records lost: the queue was full, or the disk took no more", "kind"
    ),
    "outrider_verifier_preemptions_total": _verifier("preemptions", "sequences preempted for KV cache space"),
    "outrider_verifier_running": _verifier("running", "sequences in the batch"),
    "outrider_verifier_waiting": _verifier("waiting", "sequences waiting to enter the batch"),
    "outrider_verifier_tokens_in_flight": _verifier("tokens_in_flight", "tokens of running and waiting sequences"),
    "outrider_verifier_kv_cache_usage": _verifier("kv_usage", "share of the KV cache in use, 0 to 1"),
    "outrider_verifier_num_speculative_tokens": _verifier("num_speculative_tokens", "the longest draft, in tokens (K)"),
    "outrider_verifier_plan_k": _verifier(
        "plan_k", "draft tokens asked of drafters per request at most, 0 to K; 0: they are not asked"
    ),
    "outrider_verifier_plan_changes_total": _verifier(
        "plan_changes", "times mode auto has changed between plain steps, drafting, and drafting ahead"
    ),
    # Draft counters under vLLM's names, summed over the fleet, for vLLM's benchmark client
    "vllm:spec_decode_num_drafts_total": Definition("see outrider_drafts_total", field="drafts"),
    "vllm:spec_decode_num_draft_tokens_total": Definition("see outrider_draft_tokens_total", field="draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens_total": Definition("see outrider_accepted_tokens_total", field="accepted_tokens"),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": Definition(
        "see outrider_accepted_tokens_by_position_total", ("position",), field="accepted_by_position"
    ),
    # Load under vLLM's names, over the fleet, for routers and dashboards that were made for vLLM
    "vllm:num_requests_running": Definition("sequences in the batches of all verifiers", ("model_name",)),
    "vllm:num_requests_waiting": Definition("sequences that wait at verifiers to enter a batch", ("model_name",)),
    "vllm:kv_cache_usage_perc": Definition("share of the KV cache in use, 0 to 1; mean over verifiers", ("model_name",)),
    "vllm:prefix_cache_queries_total": Definition(
        "prompt tokens that were looked up in prefix caches", ("model_name",), field="prompt_tokens"
    ),
    "vllm:prefix_cache_hits_total": Definition("of these, tokens that were found", ("model_name",), field="cached_tokens"),
    "vllm:cache_config_info": Definition(
        "1 per verifier that answers, with the tokens of a block and the blocks of its KV cache",
        ("model_name", "engine", "block_size", "num_gpu_blocks"),
    ),
    "vllm:lora_requests_info": Definition(
        "time of the scrape; this gateway's adapters in use, with commas, and how many a step may have; only with adapters",
        ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    "vllm:time_to_first_token_seconds": Definition(
        "see outrider_time_to_first_token_seconds", ("model_name",), buckets=_LATENCIES
    ),
    "vllm:inter_token_latency_seconds": Definition("see outrider_inter_chunk_seconds", ("model_name",), buckets=_LATENCIES),
}


def kind_of(name: str) -> Literal["counter", "gauge", "histogram"]:
    if name.endswith("_total"):
        return "counter"
    return "histogram" if DEFINITIONS[name].buckets else "gauge"


class GatewayMetrics:
    """Metrics of this gateway's own observations.  `FleetCore` calls the methods `on_...` about its sequences."""

    def __init__(self) -> None:
        # A gauge with the creation time of each series is useless.  The library can disable it only for the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.own, self.fleet = CollectorRegistry(), CollectorRegistry()
        """What is this gateway's, and what is equal for every gateway of the fleet."""
        self.in_flight = 0
        """Generation requests that are being served."""
        self.moves: TotalBy[tuple[MoveKind, str, str]] = TotalBy()
        """Sequences that went on at another verifier, by kind, cause and new verifier; for the fleet page."""
        self.requests = self._counter("outrider_requests_total")
        self.disconnects = self._counter("outrider_client_disconnects_total")
        self._finished = self._counter("outrider_sequences_finished_total")
        self._failovers = self._counter("outrider_failovers_total")
        self._migrations = self._counter("outrider_migrations_total")
        self._poisoned = self._counter("outrider_poisoned_total")
        self.batch_lines = self._counter("outrider_batch_lines_total")
        self._recovery = self._histogram("outrider_recovery_seconds")
        self._prompt_tokens = self._counter("outrider_prompt_tokens_total")
        self.tokens = self._counter("outrider_generated_tokens_total")
        self._first_token = self._histogram("outrider_time_to_first_token_seconds")
        self._inter_chunk = self._histogram("outrider_inter_chunk_seconds")
        self._tgs_decode = self._histogram("outrider_tgs_decode")
        self._tgs_e2e = self._histogram("outrider_tgs_e2e")
        self.under_vllms_names = {
            "vllm:time_to_first_token_seconds": self._first_token,
            "vllm:inter_token_latency_seconds": self._inter_chunk,
        }

    def _counter(self, name: str) -> Counter:
        definition = DEFINITIONS[name]
        counter = Counter(name.removesuffix("_total"), definition.help, definition.labels, registry=self.own)
        for label in definition.known:
            counter.labels(label)
        return counter

    def _histogram(self, name: str) -> Histogram:
        definition = DEFINITIONS[name]
        return Histogram(name, definition.help, definition.labels, registry=self.own, buckets=definition.buckets)

    def on_moved(self, sequence: InFlight, cut: Cut) -> None:
        """The sequence goes on at another verifier (or, after a failover, at the same one)."""
        if sequence.link is not None:
            self.moves[cut.kind, cut.cause, sequence.link.member.id] += 1
        (self._failovers if cut.kind == "failover" else self._migrations).labels(cut.cause).inc()

    def on_tokens(self, sequence: InFlight, now: float) -> None:
        """Tokens arrived in one chunk; called before `sequence` takes them in."""
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
        """The sequence ended: `stop`, `length`, ..., `aborted` here, `lost` with its verifier, or `poisoned`."""
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
