"""The fleet's reports as Prometheus metrics and as the `/fleet` document.

Reads `FleetCore` at scrape time.  Owns only the last counters of each verifier, so that totals survive a verifier's restart.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeVar, get_args

import msgspec
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from backend.fleet import (
    DraftCounters,
    DrafterStats,
    FleetSnapshot,
    Learning,
    MemberKind,
    MemberState,
    MemberView,
    OperationKind,
    OperationState,
    Verified,
    VerifierStats,
)
from gateway.fleet.core import FleetCore
from gateway.fleet.sequences import InFlight
from gateway.metrics.gateway import DEFINITIONS, REPORTED, GatewayMetrics

MODEL = "model_name"
"""The label of vLLM's names."""
UNKNOWN = FleetSnapshot(0, [], [], {})
"""Before the directory's first answer."""


def acceptance_length(counters: DraftCounters | Verified) -> float | None:
    """1 + accepted / drafts; None before the first draft."""
    return 1 + counters.accepted_tokens / counters.drafts if counters.drafts else None


SUMMED = [name for name, each in DEFINITIONS.items() if name.startswith("vllm:") and each.kind == "counter"]
"""Counters over all verifiers, under vLLM's names."""
Sums = Counter[tuple[str, ...]]
"""Their values, by name and labels."""


def _sums(stats: VerifierStats) -> Sums:
    """One verifier's part."""
    pairs = stats.drafters.values()
    total: Sums = Counter(
        {
            ("vllm:spec_decode_num_drafts_total",): sum(each.drafts for each in pairs),
            ("vllm:spec_decode_num_draft_tokens_total",): sum(each.draft_tokens for each in pairs),
            ("vllm:spec_decode_num_accepted_tokens_total",): sum(each.accepted_tokens for each in pairs),
            ("vllm:prefix_cache_queries_total",): stats.prompt_tokens,
            ("vllm:prefix_cache_hits_total",): stats.cached_tokens,
        }
    )
    for each in pairs:
        for position, accepted in enumerate(each.accepted_by_position):
            total["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)] += accepted
    return total


class FleetCollector(Collector):
    """Turns the fleet's reports into metric families at every scrape.

    Sums over verifiers include earlier incarnations, so that they never decrease.
    """

    def __init__(self, core: FleetCore, model: str) -> None:
        self._core, self._model = core, model
        self._gone = _sums(VerifierStats("", 0.0, "off", 0))
        self._last: dict[str, VerifierStats] = {}
        # At scrapes alone, what a verifier did between the last one and its restart would be lost.
        core.on_counters = self._update

    def _update(self, stats: VerifierStats) -> None:
        """Takes in a verifier's latest counters; a new `started_at` means a new incarnation."""
        last = self._last.get(stats.verifier_id)
        if last is not None and last.started_at != stats.started_at:
            self._gone.update(_sums(last))
        self._last[stats.verifier_id] = stats

    def collect(self) -> Iterator[Family]:
        stats, snapshot = self._core.stats(), self._core.snapshot or UNKNOWN
        for each in stats:
            self._update(each)
        views = snapshot.members
        members = Counter((view.member.kind, view.member.state) for view in views)
        yield _family("outrider_fleet_members", _all_of(members, MemberKind, MemberState))
        known = Counter((each.kind, each.state) for each in snapshot.operations)
        yield _family("outrider_operations", _all_of(known, OperationKind, OperationState))
        yield _family("outrider_verifier_info", _info(views, stats))
        reports = [(view.member.id, view.verifier or view.drafter) for view in views]
        refused = [([member], report.connections_refused) for member, report in reports if report is not None]
        yield _family("outrider_connections_refused_total", refused)
        verifiers = [([each.verifier_id], each) for each in stats]
        pairs = [([*of, drafter], counters) for of, each in verifiers for drafter, counters in each.drafters.items()]
        versions = [([*of, version], counted) for of, each in pairs for version, counted in each.by_version.items()]
        drafters = [([view.drafter.drafter_id], view.drafter) for view in views if view.drafter is not None]
        learning = [(of, each.learning) for of, each in drafters if each.learning is not None]
        yield from _reported(VerifierStats, verifiers)
        yield from _reported(DraftCounters, pairs)
        yield from _reported(Verified, versions)
        yield from _reported(DrafterStats, drafters)
        yield from _reported(Learning, learning)
        yield _family("outrider_drafters_down", [(of, len(each.drafters_down)) for of, each in verifiers])
        lengths = [(of, length) for of, each in pairs if (length := acceptance_length(each)) is not None]
        yield _family("outrider_acceptance_length", lengths)
        heads = [
            ([*of, head], length)
            for of, each in learning
            for head, length in (("present", each.present_length), ("candidate", each.candidate_length))
            if length is not None
        ]
        yield _family("outrider_learning_acceptance_length", heads)
        yield _family("vllm:num_requests_running", [([self._model], sum(each.running for each in stats))])
        yield _family("vllm:num_requests_waiting", [([self._model], sum(each.waiting for each in stats))])
        usage = sum(each.kv_usage for each in stats) / max(1, len(stats))
        yield _family("vllm:kv_cache_usage_perc", [([self._model], usage)])
        sums = self._gone.copy()
        for each in self._last.values():
            sums.update(_sums(each))
        for summed in SUMMED:
            of = [self._model] * (MODEL in DEFINITIONS[summed].labels)
            yield _family(summed, [([*of, *labels], value) for (name, *labels), value in sums.items() if name == summed])
        answering = [each.welcome for each in self._core.ready_links if each.welcome is not None]
        caches = [(each.verifier_id, str(each.block_size), str(each.num_kv_blocks)) for each in answering]
        yield _family("vllm:cache_config_info", [([self._model, *each], 1) for each in caches])


class GatewayCollector(Collector):
    """Metrics of this gateway's connections, queue and batches, and its own under vLLM's names.

    `max_loras`: adapters that one step may have; None: there are no adapters.
    """

    def __init__(self, core: FleetCore, metrics: GatewayMetrics, model: str, max_loras: int | None = None) -> None:
        self._core, self._metrics, self._model, self._max_loras = core, metrics, model, max_loras

    def collect(self) -> Iterator[Family]:
        gate, sequences = self._core.gate, self._core.sequences
        yield _family("outrider_requests_in_flight", [([], self._metrics.in_flight)])
        yield _family("outrider_verifiers_connected", [([], len(self._core.ready_links))])
        yield _family("outrider_queue_sequences", [([], gate.sequences)])
        yield _family("outrider_queue_tokens", [([], gate.tokens)])
        yield _family("outrider_shed_total", [([], gate.shed)])
        yield _family("outrider_batch_sequences", [(["running"], sequences.batched), (["held"], sequences.held)])
        yield _family("outrider_sequences_without_verifier", [([], len(sequences.waiting()))])
        for name, histogram in self._metrics.under_vllms_names.items():
            yield _renamed(histogram, name, self._model)
        if self._max_loras is not None:
            labels = [str(self._max_loras), _adapters(sequences, placed=False), _adapters(sequences, placed=True)]
            yield _family("vllm:lora_requests_info", [(labels, time.time())])


Samples = Iterable[tuple[list[str], float]]
"""Label values, and the value."""


def _family(name: str, samples: Samples) -> Family:
    definition = DEFINITIONS[name]
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = kind(name.removesuffix("_total"), definition.help, labels=definition.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _renamed(histogram: Histogram, name: str, model: str) -> Family:
    """The histogram under another name, with the label `model_name`."""
    renamed = Family(name, DEFINITIONS[name].help, "histogram")
    for family in histogram.collect():
        for sample in family.samples:
            renamed.add_sample(name + sample.name.removeprefix(family.name), {MODEL: model, **sample.labels}, sample.value)
    return renamed


def _adapters(sequences: Iterable[InFlight], *, placed: bool) -> str:
    """Those of sequences that have a verifier, or of the others."""
    adapters = [each.request.lora_request for each in sequences if (each.link is not None) == placed]
    return ",".join(sorted({each.lora_name for each in adapters if each is not None}))


def _all_of(counts: Mapping[Any, int], kinds: Any, states: Any) -> Samples:
    """All combinations, even with the value 0: alerts do not work on a series that comes and goes."""
    return [([kind, state], counts[kind, state]) for kind, state in product(get_args(kinds), get_args(states))]


def _info(views: list[MemberView], stats: list[VerifierStats]) -> Samples:
    """Fixed properties of verifiers, for joins and filters in queries."""
    modes = {each.verifier_id: each.mode for each in stats}
    for view in views:
        member = view.member
        if member.kind == "verifier" and member.state != "lost":
            mode = modes.get(member.id) or (view.verifier.mode if view.verifier else "")
            yield [member.id, member.model, mode, member.node], 1


ReportT = TypeVar("ReportT", bound=msgspec.Struct)


def _reported(kind: type[ReportT], reports: Sequence[tuple[list[str], ReportT]]) -> Iterator[Family]:
    """The metrics among the fields of reports of one kind, each report with its label values."""
    for field, metric in REPORTED[kind].items():
        samples = [([*of, *label], value) for of, report in reports for label, value in _values(getattr(report, field))]
        yield _family(metric.name, samples)


def _values(found: Any) -> Samples:
    """The values of a field, with the key or position of each if there are several; none if it is None."""
    if isinstance(found, dict):
        return [([key], value) for key, value in found.items()]
    if isinstance(found, list):
        return [([str(position)], value) for position, value in enumerate(found)]
    return [] if found is None else [([], found)]


def fleet_document(core: FleetCore) -> dict[str, Any]:
    """The JSON document of `/fleet`: the directory's last answer, with counters that verifiers have sent to this gateway."""
    snapshot = core.snapshot or UNKNOWN
    own = {stats.verifier_id: stats for stats in core.stats()}
    members: dict[MemberKind, list[dict[str, Any]]] = {kind: [] for kind in get_args(MemberKind)}
    lengths: dict[str, dict[str, float | None]] = {}
    for view in snapshot.members:
        member, drafter = view.member, view.drafter
        entry: dict[str, Any] = {name: getattr(member, name) for name in ("id", "incarnation", "pid", "node", "state", "model")}
        entry["last_report_s"] = round(view.last_report_s, 3)
        members[member.kind].append(entry)
        if member.kind == "verifier":
            link = core.links.get(member.id)
            stats = own.get(member.id) or view.verifier
            entry["connected"] = link is not None and link.state == "ready"
            entry.update(_verifier_load(stats))
            lengths[member.id] = _lengths(stats.drafters if stats else {})
        elif member.kind == "drafter":
            entry["verifiers"] = drafter.verifiers if drafter else []
            entry["sequences"] = drafter.sequences if drafter else 0
            entry["cache_usage"] = drafter.cache_usage if drafter else 0.0
            if drafter is not None:
                entry |= {"busy_s": drafter.busy_s, "draft_tokens": drafter.draft_tokens}
            if drafter is not None and drafter.learning is not None:
                entry["learning"] = msgspec.to_builtins(drafter.learning)
    return {
        "version": snapshot.version,
        "queued": core.gate.sequences,
        **{f"{kind}s": entries for kind, entries in members.items()},
        "assignments": [
            {"verifier": each.verifier_id, "drafter": each.drafter_id, "generation": each.generation}
            for each in snapshot.assignments
        ],
        "counters": dict(snapshot.counters),
        "acceptance_length": lengths,
    }


def _verifier_load(stats: VerifierStats | None) -> dict[str, Any]:
    if stats is None:
        return {"mode": None}
    shown = ("mode", "running", "waiting", "tokens_in_flight", "kv_usage", "steps", "tokens", "preemptions")
    plan = ("plan_k", "plan_outcomes", "plan_changes")
    load = {name: getattr(stats, name) for name in (*shown, "busy_s", "idle_s", "drafters_down", *plan)}
    load["drafters"] = {drafter: _drafted(counters) for drafter, counters in stats.drafters.items()}
    by_version = {drafter: _lengths(counters.by_version) for drafter, counters in stats.drafters.items()}
    return {**load, "weight_version": stats.weights.version, "acceptance_length_by_version": by_version}


def _drafted(counters: DraftCounters) -> dict[str, Any]:
    shown = ("drafts", "accepted_tokens", "rounds", "round_trip_s")
    return {**{name: getattr(counters, name) for name in shown}, "dropped": sum(counters.dropped.values())}


def _lengths(counted: Mapping[str, DraftCounters] | Mapping[str, Verified]) -> dict[str, float | None]:
    return {name: acceptance_length(counters) for name, counters in counted.items()}
