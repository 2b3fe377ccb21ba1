"""The reliability dashboard.  Pure data."""

from __future__ import annotations

from dashboards.expr import JOB, PAIR, VERIFIER, once, or_zero, pair_rate, quantile, rate, total, verifier_rate
from dashboards.model import Dashboard, Panel, Query, Row
from dashboards.overview import NOT_READY

_BY_VERIFIER = "{{verifier}}"


def _dropped(reasons: str) -> str:
    return pair_rate("outrider_drafts_dropped_total", "reason", labels=f'{PAIR}, reason=~"{reasons}"')


RELIABILITY = Dashboard(
    "outrider-reliability",
    "Outrider: reliability",
    "What went wrong, and whether anybody noticed.",
    [
        Row(
            "Alerts",
            [
                Panel(
                    "Firing",
                    "Alerts of the rules in dashboards/prometheus/rules that fire now.",
                    [Query('ALERTS{alertstate="firing", alertname=~"Outrider.*"}')],
                    kind="table",
                    width=12,
                    empty="nothing fires",
                ),
                Panel(
                    "Scrapes",
                    "1 where the last scrape of a gateway went well.",
                    [Query(f"up{{{JOB}}}", "{{instance}}")],
                    width=12,
                    high=1,
                    decimals=0,
                    thresholds=[(0, "red"), (1, "green")],
                    empty="no gateway is scraped",
                ),
            ],
        ),
        Row(
            "Requests",
            [
                Panel(
                    "Server errors",
                    "Requests answered with 5xx, per second, by route and status.",
                    [
                        Query(
                            or_zero(total(rate("outrider_requests_total", f'{JOB}, code=~"5.."'), "route", "code")),
                            "{{route}} {{code}}",
                        )
                    ],
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Refused",
                    "Requests answered with 4xx, per second: 401 keys, 413 sizes, 429 limits, 400 and 404 mistakes.",
                    [Query(or_zero(total(rate("outrider_requests_total", f'{JOB}, code=~"4.."'), "code")), "{{code}}")],
                    unit="reqps",
                    stacked=True,
                ),
                Panel(
                    "Clients that left",
                    "Generation requests whose client closed the connection early, per second.",
                    [Query(total(rate("outrider_client_disconnects_total", JOB)), "clients")],
                    unit="reqps",
                ),
                Panel(
                    "How sequences ended",
                    "Per second; lost: with its verifier, aborted: by the gateway.",
                    [Query(or_zero(total(rate("outrider_sequences_finished_total", JOB), "reason")), "{{reason}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Sequences lost",
                    "Sequences that ended because their verifier went away, within the last five minutes.",
                    [Query(or_zero(f'sum(increase(outrider_sequences_finished_total{{{JOB}, reason="lost"}}[5m]))'), "lost")],
                    decimals=0,
                    thresholds=[(1, "red")],
                ),
            ],
        ),
        Row(
            "Members",
            [
                Panel(
                    "Not ready",
                    "Members that start, drain or are lost. A lost one is shown for a minute, then forgotten.",
                    [Query(NOT_READY, "{{kind}} {{state}}")],
                    decimals=0,
                ),
                Panel(
                    "Verifiers answering",
                    "As each gateway sees it; gateways should agree.",
                    [Query(f"outrider_verifiers_connected{{{JOB}}}", "{{instance}}")],
                    decimals=0,
                    thresholds=[(0, "red"), (1, "green")],
                ),
                Panel(
                    "Verifier restarts",
                    "Times a verifier's counters began anew, within the last hour.",
                    [Query(once(f"resets(outrider_verifier_steps_total{{{VERIFIER}}}[1h])", "verifier"), _BY_VERIFIER)],
                    decimals=0,
                ),
                Panel(
                    "Drafts lost on the way",
                    "Drafts that came late, never came, or were not sent because a queue was full.",
                    [Query(or_zero(total(_dropped("late|lost|overflow"), "reason")), "{{reason}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Drafts that were wrong",
                    "Drafts for another length, or outside the vocabulary.",
                    [Query(or_zero(total(_dropped("stale|invalid"), "reason")), "{{reason}}")],
                    unit="ops",
                    stacked=True,
                ),
                Panel(
                    "Connections without keys",
                    "Connections to members' tcp sockets without the fleet's keys, turned away; per minute.",
                    [Query(f"60 * {once(rate('outrider_connections_refused_total', JOB), 'member')}", "{{member}}")],
                ),
                Panel(
                    "Preemptions",
                    "Sequences preempted for KV cache space, per minute.",
                    [Query(f"60 * {verifier_rate('outrider_verifier_preemptions_total')}", _BY_VERIFIER)],
                ),
            ],
        ),
        Row(
            "Moved sequences",
            [
                Panel(
                    "Failovers",
                    "Sequences that went on at another verifier after theirs was lost, per minute and cause.",
                    [Query(or_zero(f"60 * {total(rate('outrider_failovers_total', JOB), 'cause')}"), "{{cause}}")],
                    stacked=True,
                ),
                Panel(
                    "Migrations",
                    "Running sequences moved on purpose, per minute, by what asked for it.",
                    [Query(or_zero(f"60 * {total(rate('outrider_migrations_total', JOB), 'cause')}"), "{{cause}}")],
                    stacked=True,
                ),
                Panel(
                    "Pause of a moved sequence",
                    "Time without tokens as its client saw it, 95th percentile.",
                    [Query(quantile(0.95, "outrider_recovery_seconds", "kind"), "{{kind}}")],
                    unit="s",
                    empty="nothing was moved",
                ),
                Panel(
                    "Waiting for a verifier",
                    "Sequences that have lost their verifier while no other is ready.",
                    [Query(total(f"outrider_sequences_without_verifier{{{JOB}}}"), "sequences")],
                    decimals=0,
                    thresholds=[(1, "red")],
                ),
                Panel(
                    "Poisoned",
                    "Sequences given up within the last five minutes because verifiers died while serving them.",
                    [Query(f"sum(increase(outrider_poisoned_total{{{JOB}}}[5m]))", "sequences")],
                    decimals=0,
                    thresholds=[(1, "red")],
                ),
                Panel(
                    "Resumed",
                    "Sequences per minute that went on at a verifier with tokens emitted elsewhere.",
                    [Query(f"60 * {verifier_rate('outrider_verifier_resumed_total')}", _BY_VERIFIER)],
                ),
            ],
        ),
        Row(
            "Records",
            [
                Panel(
                    "Rows written",
                    "Rows of records written to disk, per second and kind; nothing where recording is off.",
                    [Query(or_zero(total(verifier_rate("outrider_records_written_total", "kind"), "kind")), "{{kind}}")],
                    unit="ops",
                    width=12,
                    stacked=True,
                ),
                Panel(
                    "Rows lost",
                    "Rows that were not written: the queue was full, or the disk took no more.",
                    [Query(or_zero(total(verifier_rate("outrider_records_dropped_total", "kind"), "kind")), "{{kind}}")],
                    unit="ops",
                    width=12,
                    stacked=True,
                ),
            ],
        ),
    ],
)
