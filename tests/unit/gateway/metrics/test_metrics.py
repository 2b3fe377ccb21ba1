from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from backend.fleet import DraftCounters, DrafterStats, FleetSnapshot, Learning, MemberView, Verified, VerifierStats
from gateway.fleet.core import FleetCore
from gateway.fleet.sequences import InFlight, Sequences
from gateway.fleet.statistics import Cut
from gateway.metrics.fleet import FleetCollector, GatewayCollector
from gateway.metrics.gateway import DEFINITIONS, GatewayMetrics
from tests.support.fleet_story import member
from tests.support.processes import ROOT


def stats(started_at: float = 1.0, drafts: int = 10, accepted: int = 15) -> VerifierStats:
    counters = DraftCounters(
        drafts=drafts,
        draft_tokens=4 * drafts,
        accepted_tokens=accepted,
        drafted_by_position=[drafts] * 4,
        accepted_by_position=[accepted - 5, 5, 0, 0],
        by_version={"0": Verified(2, 8, 6), "7": Verified(drafts, 4 * drafts, accepted)},
        dropped={"late": 1},
    )
    made = VerifierStats("v0", started_at, "sync", 4, prompt_tokens=30, cached_tokens=20, drafters={"d0": counters})
    made.requests_finished = {"stop": 2}
    return made


class Core:
    """As much of `FleetCore` as a scrape reads."""

    def __init__(self, *reports: VerifierStats) -> None:
        self.reports = list(reports)
        self.ready_links = [SimpleNamespace(welcome=SimpleNamespace(verifier_id="v0", block_size=16, num_kv_blocks=100))]
        self.sequences = Sequences()
        self.gate = SimpleNamespace(sequences=2, tokens=300, shed=1)
        self.links: dict[str, Any] = {}
        views = [MemberView(member("v0", "verifier"), 0.1), MemberView(member("d0", "drafter", "lost"), 9.0)]
        self.snapshot = FleetSnapshot(3, views, [], {"restarts": 1})

    def stats(self) -> list[VerifierStats]:
        return self.reports


def exposed(metrics: GatewayMetrics):
    text = (generate_latest(metrics.own) + generate_latest(metrics.fleet)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def collected(core: Any) -> GatewayMetrics:
    made = GatewayMetrics()
    made.fleet.register(FleetCollector(core, "demo"))
    return made


def sequence(arrived: float, tokens: int) -> InFlight:
    request = SimpleNamespace(prompt_token_ids=[1, 2, 3])
    return InFlight(request, None, arrived, emitted=list(range(tokens)))


@pytest.fixture
def metrics() -> GatewayMetrics:
    core: Any = Core(stats())
    made = collected(core)
    made.own.register(GatewayCollector(core, made, "demo", max_loras=2))
    return made


def test_every_metric_is_defined_with_its_kind_and_labels_and_in_the_documentation(metrics):
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.on_finished(sequence(0.0, 0), "stop")
    for kind in ("failover", "migration"):
        moved = sequence(0.0, 1)
        moved.cut = Cut(kind, "cause", 1.0)
        metrics.on_moved(moved, moved.cut)
        metrics.on_tokens(moved, 2.0)
    families = exposed(metrics)
    by_name = {name.removesuffix("_total"): each for name, each in DEFINITIONS.items()}
    assert families.keys() == by_name.keys()
    for name, family in families.items():
        assert family.type == by_name[name].kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(by_name[name].labels), name
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for name, each in DEFINITIONS.items():
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{name}` | {each.kind} | {labels} | {each.help} |")
    table, page = "\n".join(rows) + "\n", ROOT / "docs" / "reference" / "metrics.md"
    assert table in page.read_text(), f"docs/reference/metrics.md has to hold this table:\n{table}"


def test_drafters_counters_are_there_and_what_they_learned_where_they_learn():
    core = Core(stats())
    plain = DrafterStats("d0", 1.0, busy_s=3.0, draft_s=2.0, sequences=4, cache_usage=0.5, evictions=6, rejected=7)
    learning = DrafterStats("d1", 1.0, busy_s=8.0, learning=Learning(version=2, steps=500, new_steps=90))
    drafters = [(member(each.drafter_id, "drafter"), each) for each in (plain, learning)]
    core.snapshot.members[:] = [MemberView(who, 0.1, drafter=each) for who, each in drafters]
    families = exposed(collected(core))

    def found(name: str) -> dict[str, float]:
        return {each.labels["drafter"]: each.value for each in families[f"outrider_{name}"].samples}

    assert found("drafter_busy_seconds") == {"d0": 3.0, "d1": 8.0}
    names = ("draft_seconds", "sequences", "kv_cache_usage", "evictions", "rejected")
    assert [found(f"drafter_{name}")["d0"] for name in names] == [2.0, 4, 0.5, 6, 7]
    assert (found("learning_version"), found("learning_steps")) == ({"d1": 2}, {"d1": 90})
    assert found("learning_live_acceptance") == {}


def test_a_scrape_shows_the_fleets_totals_also_by_vllms_names(metrics):
    families = exposed(metrics)
    ended = {sample.labels["reason"]: sample.value for sample in families["outrider_sequences_finished"].samples}
    assert ended["lost"] == 0, "alerts see the first loss"
    assert {sample.value for name in ("failovers", "migrations") for sample in families[f"outrider_{name}"].samples} == {0}
    counted = [families[f"outrider_{name}_by_version"].samples for name in ("drafts", "draft_tokens", "accepted_tokens")]
    by_version = {each[0].labels["version"]: [one.value for one in each] for each in zip(*counted, strict=True)}
    assert by_version == {"0": [2, 8, 6], "7": [10, 40, 15]}
    for name in ("running", "waiting"):
        (load,) = families[f"vllm:num_requests_{name}"].samples
        total = sum(each.value for each in families[f"outrider_verifier_{name}"].samples)
        assert (load.labels, load.value) == ({"model_name": "demo"}, total)
    (cache,) = families["vllm:cache_config_info"].samples
    labels = {"model_name": "demo", "engine": "v0", "block_size": "16", "num_gpu_blocks": "100"}
    assert (cache.labels, cache.value) == (labels, 1)
    for name, value in (("queries", 30), ("hits", 20)):
        (tokens,) = families[f"vllm:prefix_cache_{name}"].samples
        assert (tokens.name, tokens.labels, tokens.value) == (f"vllm:prefix_cache_{name}_total", {"model_name": "demo"}, value)


def test_adapters_in_use_are_shown_where_there_are_adapters():
    core = Core(stats())
    for number, (adapter, is_cut) in enumerate((("sql", False), ("c", False), ("sql", False), (None, False), ("late", True))):
        lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
        request: Any = SimpleNamespace(request_id=f"r{number}", prompt_token_ids=[1], lora_request=lora)
        record, at = InFlight(request, None, 0.0), cast(Any, SimpleNamespace(member=SimpleNamespace(id="v0")))
        core.sequences.put(record, at)
        if is_cut:
            core.sequences.cut(record, None)
    adapted, plain = GatewayMetrics(), GatewayMetrics()
    adapted.own.register(GatewayCollector(cast(FleetCore, core), adapted, "demo", max_loras=2))
    plain.own.register(GatewayCollector(cast(FleetCore, core), plain, "demo"))
    (shown,) = exposed(adapted)["vllm:lora_requests_info"].samples
    assert shown.labels == {"max_lora": "2", "running_lora_adapters": "c,sql", "waiting_lora_adapters": "late"}
    assert "vllm:lora_requests_info" not in exposed(plain)


def test_what_a_verifier_counted_between_a_scrape_and_its_restart_is_kept():
    core = Mock(snapshot=Core().snapshot, ready_links=[])
    reports = [stats(drafts=10), stats(drafts=12), stats(started_at=2.0, drafts=1, accepted=5)]
    core.stats = lambda: reports[-1:]
    metrics = collected(core)
    for report in reports:
        FleetCore.on_stats(core, Mock(), report)
    assert exposed(metrics)["vllm:spec_decode_num_drafts"].samples[0].value == 13


def test_timing_definitions(metrics):
    one = sequence(arrived=10.0, tokens=0)
    metrics.on_tokens(one, 12.0)
    metrics.tokens.inc(5)
    one.first_token = one.last_token = 12.0
    one.emitted = [1, 2]
    metrics.on_tokens(one, 13.0)
    one.last_token, one.emitted = 13.0, [1, 2, 3, 4, 5]
    metrics.on_finished(one, "stop")
    families = exposed(metrics)

    def total(name: str) -> float:
        return next(each.value for each in families[name].samples if each.name.endswith("_sum"))

    assert total("outrider_time_to_first_token_seconds") == total("vllm:time_to_first_token_seconds") == 2.0
    assert total("outrider_inter_chunk_seconds") == total("vllm:inter_token_latency_seconds") == 1.0
    assert total("outrider_tgs_decode") == (5 - 1) / 1.0
    assert total("outrider_tgs_e2e") == pytest.approx(5 / 3.0)
    assert families["outrider_generated_tokens"].samples[0].value == 5
    assert families["outrider_prompt_tokens"].samples[0].value == 3
    # Recovery is the time without tokens.
    begun, fresh = sequence(arrived=10.0, tokens=2), sequence(arrived=10.0, tokens=0)
    begun.first_token, begun.last_token = 11.0, 12.0
    for one in (begun, fresh):
        one.cut = Cut("failover", "silent", 20.0)
        metrics.on_tokens(one, 21.5)
    families = exposed(metrics)
    assert total("outrider_recovery_seconds") == (21.5 - 12.0) + (21.5 - 20.0)
