"""The overview dashboard, to be looked at first, and expressions that other dashboards use too.  Pure data."""

from __future__ import annotations

from dashboards.expr import (
    JOB,
    VERIFIER,
    acceptance_length,
    once,
    or_zero,
    quantile,
    rate,
    ratio,
    total,
    verifier_gauge,
    verifier_rate,
)
from dashboards.model import Dashboard, Panel
from dashboards.shapes import NO_DRAFTS, NO_TRAFFIC, plot, share, stat

IDLE = "outrider_verifier_idle_seconds_total"
BUSY = "outrider_verifier_busy_seconds_total"
TTFT = "outrider_time_to_first_token_seconds"
CHUNK = "outrider_inter_chunk_seconds"
ANSWERING = once(f"outrider_verifiers_connected{{{JOB}}}")
NOT_READY = once(f'outrider_fleet_members{{{JOB}, state!="ready"}}', "kind", "state")
_ROUTES = f'{JOB}, route=~"/v1/.*"'
_QUANTILES = (0.5, 0.95, 0.99)


def _quantiles(histogram: str) -> dict[str, str]:
    return {f"p{100 * q:g}": quantile(q, histogram) for q in _QUANTILES}


def _idle_share(cause: str) -> str:
    idle = total(verifier_rate(IDLE, labels=f'{VERIFIER}, cause="{cause}"'))
    return ratio(idle, f"count({verifier_gauge('outrider_verifier_running')})")


STATS = {
    "Verifiers answering": stat(
        "Verifiers that answer a gateway. Clients get 503 at zero.",
        f"sum({ANSWERING})",
        decimals=0,
        thresholds=[(0, "red"), (1, "green")],
    ),
    "Members not ready": stat(
        "Members that start, drain or are lost, of every kind.",
        or_zero(f"sum({NOT_READY})"),
        decimals=0,
        thresholds=[(1, "orange")],
    ),
    "Tokens per second": stat(
        "Tokens emitted by the verifiers chosen above.",
        total(verifier_rate("outrider_verifier_tokens_total")),
        decimals=0,
        empty=NO_TRAFFIC,
    ),
    "Acceptance length": stat(
        "1 + accepted tokens / drafts, of the sums over verifiers and drafters. 1 means that drafting gains nothing.",
        acceptance_length(),
        decimals=2,
        low=1,
        empty=NO_DRAFTS,
        thresholds=[(1, "red"), (1.3, "orange"), (1.8, "green")],
    ),
    "Waiting for drafts": stat(
        "Share of verifier time spent waiting for drafts, mean over the verifiers chosen above.",
        _idle_share("awaiting_draft"),
        unit="percentunit",
        high=1,
        thresholds=[(0.2, "orange"), (0.4, "red")],
    ),
    "Queue": stat(
        "Sequences that wait to enter a verifier's batch.",
        total(verifier_gauge("outrider_verifier_waiting")),
        decimals=0,
        thresholds=[(1, "orange"), (64, "red")],
    ),
    "Time to first token, p95": stat(
        "From a request's arrival at the gateway to its first token.",
        quantile(0.95, TTFT),
        unit="s",
        empty=NO_TRAFFIC,
        thresholds=[(1, "orange"), (5, "red")],
    ),
    "Server errors": stat(
        "Share of requests answered with 5xx, over all routes below /v1.",
        ratio(
            or_zero(total(rate("outrider_requests_total", f'{_ROUTES}, code=~"5.."'))),
            total(rate("outrider_requests_total", _ROUTES)),
        ),
        unit="percentunit",
        high=1,
        empty=NO_TRAFFIC,
        thresholds=[(0.001, "orange"), (0.02, "red")],
    ),
}

OVERVIEW = Dashboard(
    "outrider-overview",
    "Outrider: overview",
    "Is the fleet well, how fast is it, and what does the hardware wait for?",
    {
        "Now": STATS,
        "Traffic": {
            "Requests by status": plot(
                "Requests per second below /v1; 499: the client left before its answer, 429: over the limit in flight.",
                total(rate("outrider_requests_total", _ROUTES), "code"),
                "{{code}}",
                unit="reqps",
                stacked=True,
                empty=NO_TRAFFIC,
            ),
            "Requests in flight": plot(
                "Generation requests being served, by gateway.", f"outrider_requests_in_flight{{{JOB}}}", "{{instance}}"
            ),
            "Waiting at the gateways": Panel(
                "Sequences that wait for room at a verifier, and requests per second answered 503 instead.",
                {
                    "sequences": total(f"outrider_queue_sequences{{{JOB}}}"),
                    "turned away": total(rate("outrider_shed_total", JOB)),
                },
            ),
            "Tokens waiting": plot(
                "Prompts and expected outputs of sequences that wait, by gateway.",
                f"outrider_queue_tokens{{{JOB}}}",
                "{{instance}}",
            ),
            "Batches": Panel(
                "Sequences of batches at verifiers, and held back while others are served; lines carried out per second.",
                {
                    "{{state}}": total(f"outrider_batch_sequences{{{JOB}}}", "state"),
                    "lines per second": total(rate("outrider_batch_lines_total", JOB)),
                },
            ),
            "Tokens": Panel(
                "Prompt tokens of sequences that began, and tokens generated, as the gateways saw them.",
                {
                    "generated": total(rate("outrider_generated_tokens_total", JOB)),
                    "prompt": total(rate("outrider_prompt_tokens_total", JOB)),
                },
                unit="cps",
            ),
        },
        "Speed as clients see it": {
            "Time to first token": Panel(
                "From a request's arrival at the gateway to its first token.", _quantiles(TTFT), unit="s", empty=NO_TRAFFIC
            ),
            "Between chunks": Panel(
                "Between two chunks of one sequence; a chunk is what one verification emitted.",
                _quantiles(CHUNK),
                unit="s",
                empty=NO_TRAFFIC,
            ),
            "TGS": Panel(
                "Tokens per second of one sequence, of sequences that finished: between first and last token (decode), and "
                "from arrival (e2e). Low quantiles are the slow ones.",
                {
                    "decode, median": quantile(0.5, "outrider_tgs_decode"),
                    "decode, slowest 5 %": quantile(0.05, "outrider_tgs_decode"),
                    "e2e, median": quantile(0.5, "outrider_tgs_e2e"),
                },
                unit="cps",
                empty=NO_TRAFFIC,
            ),
        },
        "What the hardware does": {
            "Verifier time": Panel(
                "Share of time by what it went to, mean over verifiers; busy and the causes of idling add up to 1.",
                {"busy": f"avg({verifier_rate(BUSY)})", "idle: {{cause}}": f"avg by (cause) ({verifier_rate(IDLE, 'cause')})"},
                unit="percentunit",
                high=1,
                stacked=True,
            ),
            "Acceptance length": Panel(
                "1 + accepted tokens / drafts, of the sums; the dashed lines are where drafting hardly pays.",
                {"fleet": acceptance_length(), "{{verifier}}": acceptance_length("verifier")},
                low=1,
                decimals=2,
                empty=NO_DRAFTS,
                thresholds=[(1, "red"), (1.3, "green")],
            ),
            "KV cache": share(
                "Share of each verifier's KV cache in use; near 1 sequences are preempted.",
                verifier_gauge("outrider_verifier_kv_cache_usage"),
                thresholds=[(0.95, "red")],
            ),
            "Running and waiting": Panel(
                "Sequences in the batches, and sequences waiting to enter one.",
                {
                    "running": total(verifier_gauge("outrider_verifier_running")),
                    "waiting": total(verifier_gauge("outrider_verifier_waiting")),
                },
                width=12,
            ),
            "Tokens by verifier": plot(
                "Tokens emitted per second; a verifier far below its peers has too little work, or too much trouble.",
                verifier_rate("outrider_verifier_tokens_total"),
                unit="cps",
                width=12,
                stacked=True,
            ),
        },
    },
)
