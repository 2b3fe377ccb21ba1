"""The gateway's Prometheus metrics.  `DEFINITIONS` describes each one; a test compares it with the documentation.

Metrics have two sources: this gateway's own observations (`GatewayMetrics`), and the members' reports
(`gateway.metrics.fleet`), whose structs declare their metrics (`backend/fleet/stats.py`).  Both use a registry of our own,
because vLLM's loggers unregister collectors in the default one.  Everything runs in the event loop.

`FleetCore` calls the methods `on_...` about sequences; `Envelope` (`gateway/http/middleware.py`) counts requests, which it sees
with every error but those of `protocol.py` and of streams that have begun.  A new metric needs its line in
docs/reference/metrics.md and a panel in `dashboards/grafana/dashboards/`; tests fail without them.
"""

from collections import Counter as TotalBy
from typing import Annotated

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from backend.fleet import DraftCounters, DrafterStats, Learning, Metric, Verified, VerifierStats, metrics_of
from gateway.fleet.sequences import InFlight
from gateway.fleet.statistics import Cut, MoveKind

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SPEEDS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000, 2000)


class GatewayMetrics:
    """Metrics of this gateway's own observations.  `FleetCore` calls the methods `on_...` about its sequences."""

    requests: Annotated[Counter, Metric("outrider_requests_total", labels=("route", "code"))]
    """HTTP requests by route and status; 499: the client left first."""
    disconnects: Annotated[Counter, Metric("outrider_client_disconnects_total")]
    """Requests whose client left early."""
    _finished: Annotated[
        Counter,
        Metric(
            "outrider_sequences_finished_total",
            labels=("reason",),
            known=("stop", "length", "error", "aborted", "lost", "poisoned"),
        ),
    ]
    """Sequences by how they ended: vLLM's reasons, `aborted` by this gateway, `lost` or `poisoned`."""
    _failovers: Annotated[
        Counter,
        Metric(
            "outrider_failovers_total",
            labels=("cause",),
            known=("disconnected", "silent", "declared_lost", "restarted", "forgotten", "given_up", "incompatible"),
        ),
    ]
    """Sequences that went on at another verifier after theirs was lost: `disconnected`, `silent`, `declared_lost` by the
    coordinator, `restarted`, `forgotten` there, `given_up` there, `incompatible`."""
    _migrations: Annotated[Counter, Metric("outrider_migrations_total", labels=("cause",), known=("balance", "drain"))]
    """Running sequences moved to another verifier on purpose, by what asked for it."""
    _poisoned: Annotated[Counter, Metric("outrider_poisoned_total")]
    """Sequences refused because verifiers were lost one after the other while serving them."""
    batch_lines: Annotated[Counter, Metric("outrider_batch_lines_total", labels=("status",))]
    """Lines of batches carried out, by HTTP status."""
    _recovery: Annotated[Histogram, Metric("outrider_recovery_seconds", labels=("kind",), buckets=_LATENCIES)]
    """Time without tokens of a sequence that was moved: from its last token before (or from the cut, where there was none) to
    its next one; kind is `failover` or `migration`."""
    _prompt_tokens: Annotated[Counter, Metric("outrider_prompt_tokens_total")]
    """Prompt tokens of sequences that got a first token."""
    tokens: Annotated[Counter, Metric("outrider_generated_tokens_total")]
    """Tokens of answers, as their usage counts them."""
    _first_token: Annotated[Histogram, Metric("outrider_time_to_first_token_seconds", buckets=_LATENCIES)]
    """From a request's arrival to its first token."""
    _inter_chunk: Annotated[Histogram, Metric("outrider_inter_chunk_seconds", buckets=_LATENCIES)]
    """Between two chunks of one sequence; a chunk is what one verification emitted."""
    _tgs_decode: Annotated[Histogram, Metric("outrider_tgs_decode", buckets=_SPEEDS)]
    """Tokens per second of one sequence: (n - 1) / (last token - first token)."""
    _tgs_e2e: Annotated[Histogram, Metric("outrider_tgs_e2e", buckets=_SPEEDS)]
    """Tokens per second of one sequence: n / (last token - arrival)."""

    def __init__(self) -> None:
        # A gauge with the creation time of each series is useless.  The library can disable it only for the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.own, self.fleet = CollectorRegistry(), CollectorRegistry()
        """What is this gateway's, and what is equal for every gateway of the fleet."""
        self.in_flight = 0
        """Generation requests that are being served."""
        self.moves: TotalBy[tuple[MoveKind, str, str]] = TotalBy()
        """Sequences that went on at another verifier, by kind, cause and new verifier; for the fleet page."""
        for name, metric in metrics_of(GatewayMetrics).items():
            setattr(self, name, _made(metric, self.own))
        self.under_vllms_names = {
            "vllm:time_to_first_token_seconds": self._first_token,
            "vllm:inter_token_latency_seconds": self._inter_chunk,
        }

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


def _made(metric: Metric, registry: CollectorRegistry) -> Counter | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    counter = Counter(metric.name.removesuffix("_total"), metric.help, metric.labels, registry=registry)
    for label in metric.known:
        counter.labels(label)
    return counter


_AT_SCRAPES = (
    # This gateway
    Metric("outrider_requests_in_flight", "generation requests being served"),
    Metric(
        "outrider_batch_sequences",
        "sequences of batches: `running` at verifiers, or `held` while others are served",
        ("state",),
    ),
    Metric("outrider_sequences_without_verifier", "sequences that have lost their verifier and wait for another to be ready"),
    Metric("outrider_queue_sequences", "sequences that wait at this gateway for room at a verifier"),
    Metric("outrider_queue_tokens", "their tokens, prompts and expected outputs"),
    Metric(
        "outrider_shed_total", "requests answered 503 because they waited too long for room, would have, or the queue was full"
    ),
    # The fleet
    Metric("outrider_fleet_members", "members the directory knows", ("kind", "state")),
    Metric(
        "outrider_operations", "administrative operations by kind and state; ended ones are kept for a while", ("kind", "state")
    ),
    Metric("outrider_verifiers_connected", "verifiers that answer this gateway"),
    Metric("outrider_verifier_info", "1 per verifier that is not lost", ("verifier", "model", "mode", "node")),
    Metric(
        "outrider_connections_refused_total",
        "connections to a verifier's or drafter's tcp socket without this fleet's keys",
        ("member",),
    ),
    Metric(
        "outrider_acceptance_length",
        "1 + accepted tokens / drafts since the verifier started; absent before the first draft",
        ("verifier", "drafter"),
    ),
    Metric("outrider_drafters_down", "assigned drafters that are not waited for", ("verifier",)),
    Metric(
        "outrider_learning_acceptance_length",
        "acceptance length of the `present` head and the `candidate` on held-out sequences",
        ("drafter", "head"),
    ),
    # Draft counters under vLLM's names, summed over the fleet, for vLLM's benchmark client
    Metric("vllm:spec_decode_num_drafts_total", "see outrider_drafts_total"),
    Metric("vllm:spec_decode_num_draft_tokens_total", "see outrider_draft_tokens_total"),
    Metric("vllm:spec_decode_num_accepted_tokens_total", "see outrider_accepted_tokens_total"),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total", "see outrider_accepted_tokens_by_position_total", ("position",)
    ),
    # Load under vLLM's names, over the fleet, for routers and dashboards that were made for vLLM
    Metric("vllm:num_requests_running", "sequences in the batches of all verifiers", ("model_name",)),
    Metric("vllm:num_requests_waiting", "sequences that wait at verifiers to enter a batch", ("model_name",)),
    Metric("vllm:kv_cache_usage_perc", "share of the KV cache in use, 0 to 1; mean over verifiers", ("model_name",)),
    Metric("vllm:prefix_cache_queries_total", "prompt tokens that were looked up in prefix caches", ("model_name",)),
    Metric("vllm:prefix_cache_hits_total", "of these, tokens that were found", ("model_name",)),
    Metric(
        "vllm:cache_config_info",
        "1 per verifier that answers, with the tokens of a block and the blocks of its KV cache",
        ("model_name", "engine", "block_size", "num_gpu_blocks"),
    ),
    Metric(
        "vllm:lora_requests_info",
        "time of the scrape; this gateway's adapters in use, with commas, and how many a step may have; only with adapters",
        ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    Metric("vllm:time_to_first_token_seconds", "see outrider_time_to_first_token_seconds", ("model_name",), buckets=_LATENCIES),
    Metric("vllm:inter_token_latency_seconds", "see outrider_inter_chunk_seconds", ("model_name",), buckets=_LATENCIES),
)

REPORTED: dict[type[msgspec.Struct], dict[str, Metric]] = {
    DraftCounters: metrics_of(DraftCounters, "verifier", "drafter"),
    Verified: metrics_of(Verified, "verifier", "drafter", "version"),
    DrafterStats: metrics_of(DrafterStats, "drafter"),
    Learning: metrics_of(Learning, "drafter"),
    VerifierStats: metrics_of(VerifierStats, "verifier"),
}
"""What members report: the metrics among the fields of each struct.  Their first labels tell whose report it is."""

_DECLARED = [metric for fields in (metrics_of(GatewayMetrics), *REPORTED.values()) for metric in fields.values()]
DEFINITIONS = {each.name: each for each in (*_DECLARED, *_AT_SCRAPES)}
"""Every metric by its name, in the order of the documentation."""
