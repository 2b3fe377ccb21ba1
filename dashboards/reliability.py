"""The reliability dashboard.  Pure data."""

from __future__ import annotations

from dashboards.expr import JOB, PAIR, VERIFIER, once, or_zero, pair_rate, quantile, rate, total, verifier_rate
from dashboards.model import Dashboard, Panel
from dashboards.overview import NOT_READY
from dashboards.shapes import count, plot, stacked


def _dropped(reasons: str) -> str:
    return pair_rate("outrider_drafts_dropped_total", "reason", labels=f'{PAIR}, reason=~"{reasons}"')


RELIABILITY = Dashboard(
    "outrider-reliability",
    "Outrider: reliability",
    "What went wrong, and whether anybody noticed.",
    {
        "Alerts": {
            "Firing": Panel(
                "Alerts of the rules in dashboards/prometheus/rules that fire now.",
                {"": 'ALERTS{alertstate="firing", alertname=~"Outrider.*"}'},
                kind="table",
                empty="nothing fires",
            ),
            "Scrapes": count(
                "1 where the last scrape of a gateway went well.",
                f"up{{{JOB}}}",
                "{{instance}}",
                high=1,
                thresholds=[(0, "red"), (1, "green")],
                empty="no gateway is scraped",
            ),
        },
        "Requests": {
            "Server errors": stacked(
                "Requests answered with 5xx, per second, by route and status.",
                total(rate("outrider_requests_total", f'{JOB}, code=~"5.."'), "route", "code"),
                "route",
                "code",
                unit="reqps",
            ),
            "Refused": stacked(
                "Requests answered with 4xx, per second: 401 keys, 413 sizes, 429 limits, 400 and 404 mistakes.",
                total(rate("outrider_requests_total", f'{JOB}, code=~"4.."'), "code"),
                "code",
                unit="reqps",
            ),
            "Clients that left": plot(
                "Generation requests whose client closed the connection early, per second.",
                total(rate("outrider_client_disconnects_total", JOB)),
                "clients",
                unit="reqps",
            ),
            "How sequences ended": stacked(
                "Per second; lost: with its verifier, aborted: by the gateway.",
                total(rate("outrider_sequences_finished_total", JOB), "reason"),
                "reason",
            ),
            "Sequences lost": count(
                "Sequences that ended because their verifier went away, within the last five minutes.",
                or_zero(f'sum(increase(outrider_sequences_finished_total{{{JOB}, reason="lost"}}[5m]))'),
                "lost",
                thresholds=[(1, "red")],
            ),
        },
        "Members": {
            "Not ready": count(
                "Members that start, drain or are lost. A lost one is shown for a minute, then forgotten.",
                NOT_READY,
                "{{kind}} {{state}}",
            ),
            "Verifiers answering": count(
                "As each gateway sees it; gateways should agree.",
                f"outrider_verifiers_connected{{{JOB}}}",
                "{{instance}}",
                thresholds=[(0, "red"), (1, "green")],
            ),
            "Verifier restarts": count(
                "Times a verifier's counters began anew, within the last hour.",
                once(f"resets(outrider_verifier_steps_total{{{VERIFIER}}}[1h])", "verifier"),
            ),
            "Drafts lost on the way": stacked(
                "Drafts that came late, never came, or were not sent because a queue was full.",
                total(_dropped("late|lost|overflow"), "reason"),
                "reason",
            ),
            "Drafts that were wrong": stacked(
                "Drafts for another length, or outside the vocabulary.", total(_dropped("stale|invalid"), "reason"), "reason"
            ),
            "Connections without keys": Panel(
                "Connections to members' tcp sockets without the fleet's keys, turned away; per minute.",
                {"{{member}}": f"60 * {once(rate('outrider_connections_refused_total', JOB), 'member')}"},
            ),
            "Preemptions": plot(
                "Sequences preempted for KV cache space, per minute.",
                f"60 * {verifier_rate('outrider_verifier_preemptions_total')}",
            ),
        },
        "Moved sequences": {
            "Failovers": stacked(
                "Sequences that went on at another verifier after theirs was lost, per minute and cause.",
                f"60 * {total(rate('outrider_failovers_total', JOB), 'cause')}",
                "cause",
                unit="short",
            ),
            "Migrations": stacked(
                "Running sequences moved on purpose, per minute, by what asked for it.",
                f"60 * {total(rate('outrider_migrations_total', JOB), 'cause')}",
                "cause",
                unit="short",
            ),
            "Pause of a moved sequence": plot(
                "Time without tokens as its client saw it, 95th percentile.",
                quantile(0.95, "outrider_recovery_seconds", "kind"),
                "{{kind}}",
                unit="s",
                empty="nothing was moved",
            ),
            "Waiting for a verifier": count(
                "Sequences that have lost their verifier while no other is ready.",
                total(f"outrider_sequences_without_verifier{{{JOB}}}"),
                "sequences",
                thresholds=[(1, "red")],
            ),
            "Poisoned": count(
                "Sequences given up within the last five minutes because verifiers died while serving them.",
                f"sum(increase(outrider_poisoned_total{{{JOB}}}[5m]))",
                "sequences",
                thresholds=[(1, "red")],
            ),
            "Resumed": plot(
                "Sequences per minute that went on at a verifier with tokens emitted elsewhere.",
                f"60 * {verifier_rate('outrider_verifier_resumed_total')}",
            ),
        },
        "Administration": {
            "Operations": count(
                "Changes of the fleet that were asked for: those that wait, run, or ended of late.",
                or_zero(f"{once(f'outrider_operations{{{JOB}}}', 'kind', 'state')} > 0"),
                "{{kind}} {{state}}",
            ),
            "Draining": count(
                "Members that finish what they have and take nothing new.",
                once(f'outrider_fleet_members{{{JOB}, state="draining"}}', "kind"),
                "{{kind}}",
            ),
            "Commands": stacked(
                "Requests to the administrative routes per second, by route and status.",
                total(rate("outrider_requests_total", f'{JOB}, route=~"/admin/.*"'), "route", "code"),
                "route",
                "code",
                unit="reqps",
            ),
        },
        "Records": {
            "Rows written": stacked(
                "Rows of records written to disk, per second and kind; nothing where recording is off.",
                total(verifier_rate("outrider_records_written_total", "kind"), "kind"),
                "kind",
            ),
            "Rows lost": stacked(
                "Rows that were not written: the queue was full, or the disk took no more.",
                total(verifier_rate("outrider_records_dropped_total", "kind"), "kind"),
                "kind",
            ),
        },
    },
)
