"""The speculation dashboard.  Pure data."""

from __future__ import annotations

from dashboards.expr import (
    JOB,
    PAIR,
    VERIFIER,
    acceptance_length,
    drafter_gauge,
    drafter_rate,
    once,
    pair_rate,
    pair_ratio,
    rate,
    ratio,
    total,
    verifier_gauge,
    verifier_rate,
)
from dashboards.model import Dashboard, Panel
from dashboards.overview import IDLE
from dashboards.shapes import NO_DRAFTS, NO_TRAFFIC, count, length, plot, share, stacked

_ENDS = ("verifier", "drafter")
_TRAINING = {
    "steps": "steps",
    "seconds": "seconds",
    "sequences": "sequences",
    "sequences_dropped": "sequences lost",
    "published": "put in place",
    "taken_back": "taken back",
}
NO_LEARNING = "no drafter learns"


def _by_version(whole: str) -> str:
    """Accepted tokens / another counter, by version of the weights; look-ups are left out, as they do not depend on weights."""
    kept, counted = (
        total(pair_rate(name, "version", labels=f'{PAIR}, drafter!="lookup"'), "version")
        for name in ("outrider_accepted_tokens_by_version_total", whole)
    )
    return ratio(kept, counted)


SPECULATION = Dashboard(
    "outrider-speculation",
    "Outrider: speculation",
    "What drafting gains, what it costs, and where drafts are lost.",
    {
        "Gain": {
            "Acceptance length by pair": length(
                "1 + accepted tokens / drafts of one verifier with one drafter.",
                acceptance_length("verifier", "drafter"),
                "{{verifier}} < {{drafter}}",
            ),
            "Acceptance rate": share(
                "Accepted tokens / draft tokens. Unlike the acceptance length, it falls as more of each draft is verified.",
                pair_ratio("outrider_accepted_tokens_total", "outrider_draft_tokens_total", "drafter"),
                "{{drafter}}",
                empty=NO_DRAFTS,
            ),
            "Acceptance by position": share(
                "Share of the draft tokens at each position that were kept; position 0 is the first. A position is "
                "kept only if all before it were.",
                pair_ratio(
                    "outrider_accepted_tokens_by_position_total",
                    "outrider_draft_tokens_by_position_total",
                    "position",
                    labels=("position",),
                ),
                "position {{position}}",
                empty=NO_DRAFTS,
            ),
            "Draft tokens": Panel(
                "Draft tokens verified and draft tokens kept, per second.",
                {
                    "verified": total(pair_rate("outrider_draft_tokens_total")),
                    "kept": total(pair_rate("outrider_accepted_tokens_total")),
                },
                unit="cps",
                empty=NO_DRAFTS,
            ),
            "Tokens per verification": plot(
                "Tokens emitted per sequence and verification, verifications without a draft included: what speculation "
                "multiplies the speed of a step by.",
                ratio(
                    total(verifier_rate("outrider_verifier_tokens_total"), "verifier"),
                    total(verifier_rate("outrider_verifier_verifications_total"), "verifier"),
                ),
                low=1,
                decimals=2,
                empty=NO_TRAFFIC,
            ),
            "Acceptance length by version of the weights": length(
                "Of drafters' drafts, by the version of the target's weights that verified them. It falls where the target "
                "moves away from what the drafter was trained for.",
                f"1 + {_by_version('outrider_drafts_by_version_total')}",
                "version {{version}}",
                width=12,
            ),
            "Acceptance rate by version of the weights": share(
                "Accepted tokens / draft tokens of the same drafts.",
                _by_version("outrider_draft_tokens_by_version_total"),
                "version {{version}}",
                width=12,
                empty=NO_DRAFTS,
            ),
            "Verifications with a draft": share(
                "Share of verifications that had at least one draft token; the rest decoded plainly.",
                ratio(
                    total(pair_rate("outrider_drafts_total"), "verifier"),
                    total(verifier_rate("outrider_verifier_verifications_total"), "verifier"),
                ),
                empty=NO_TRAFFIC,
            ),
        },
        "Other sources of drafts": {
            "Drafted by prompt lookup": share(
                "Share of drafts that the verifier made itself, from a request's own text: where they promised more than "
                "the drafter's, or there was none of a drafter's.",
                ratio(
                    total(pair_rate("outrider_drafts_total", labels=f'{VERIFIER}, drafter="lookup"'), "verifier"),
                    total(pair_rate("outrider_drafts_total", labels=VERIFIER), "verifier"),
                ),
                empty="nothing was drafted by prompt lookup",
            ),
            "Drafted ahead of time": share(
                "Share of verifications whose outcome the drafter had foreseen, while it drafts ahead; the rest wait for a "
                "fresh draft, or do without.",
                ratio(
                    total(pair_rate("outrider_ahead_hits_total"), *_ENDS),
                    f"({total(pair_rate('outrider_ahead_hits_total'), *_ENDS)} "
                    f"+ {total(pair_rate('outrider_ahead_misses_total'), *_ENDS)})",
                ),
                "{{verifier}} < {{drafter}}",
                empty="nothing is drafted ahead",
            ),
        },
        "Cost": {
            "Round trip": plot(
                "From sending features to having the draft, mean over rounds.",
                ratio(pair_rate("outrider_draft_round_trip_seconds_total"), pair_rate("outrider_draft_rounds_total")),
                "{{verifier}} < {{drafter}}",
                unit="s",
                empty=NO_DRAFTS,
            ),
            "Where a round trip goes": Panel(
                "Mean per round: the drafter's compute, waiting in its queue, and transfer: the rest, as far as it was "
                "waited for.",
                {
                    part: pair_ratio(f"outrider_draft_{part}_seconds_total", "outrider_draft_rounds_total")
                    for part in ("compute", "queue", "transfer")
                },
                unit="s",
                stacked=True,
                empty=NO_DRAFTS,
            ),
            "Waiting for drafts": share(
                "Share of each verifier's time spent waiting for drafts.",
                verifier_rate(IDLE, labels=f'{VERIFIER}, cause="awaiting_draft"'),
            ),
            "Sent to drafters": plot(
                "Features and tokens, bytes per second.",
                pair_rate("outrider_draft_sent_bytes_total"),
                "{{verifier}} > {{drafter}}",
                unit="Bps",
            ),
            "Drafts not used": stacked(
                "Per second and reason: finished (the request ended first), late (after its deadline), lost (never came), "
                "stale (for another length), invalid (not of this vocabulary), overflow (the drafter's queue was full).",
                total(pair_rate("outrider_drafts_dropped_total", "reason"), "reason"),
                "reason",
            ),
            "Drafters not waited for": count(
                "Assigned drafters whose circuit breaker is open.",
                verifier_gauge("outrider_drafters_down"),
                thresholds=[(1, "red")],
            ),
        },
        "Plans": {
            "K in force": Panel(
                "Draft tokens asked of drafters per request at most; 0: drafters are not asked. How many are verified is "
                "decided in every step.",
                {
                    "{{verifier}}": verifier_gauge("outrider_verifier_plan_k"),
                    "most allowed": f"max({verifier_gauge('outrider_verifier_num_speculative_tokens')})",
                },
                decimals=0,
            ),
            "Changes of plan": plot(
                "How often mode auto changes between plain steps, drafting, and drafting ahead, per minute.",
                f"60 * {verifier_rate('outrider_verifier_plan_changes_total')}",
            ),
        },
        "Learning": {
            "Heads on held-out sequences": Panel(
                "Acceptance length of the head in use and of the one in training, and the version in use.",
                {
                    "{{drafter}} {{head}}": drafter_gauge("outrider_learning_acceptance_length", "head"),
                    "{{drafter}} version": drafter_gauge("outrider_learning_version"),
                },
                decimals=2,
                empty=NO_LEARNING,
            ),
            "Live acceptance of a learning head": plot(
                "Share of right draft tokens among those compared with the text, lately.",
                drafter_gauge("outrider_learning_live_acceptance"),
                "{{drafter}}",
                unit="percentunit",
                empty=NO_LEARNING,
            ),
            "Training": Panel(
                "Per minute: steps, seconds, sequences taken and lost, heads put in place and taken back.",
                {
                    f"{{{{drafter}}}} {said}": f"60 * {drafter_rate(f'outrider_learning_{name}_total')}"
                    for name, said in _TRAINING.items()
                },
                empty=NO_LEARNING,
            ),
        },
        "Under vLLM's names": {
            "Acceptance length as vLLM counts it": length(
                "From the counters that carry vLLM's names, summed over the fleet and all restarts; it should agree with "
                "the first row.",
                "1 + "
                + ratio(
                    f"sum({once(rate('vllm:spec_decode_num_accepted_tokens_total', JOB))})",
                    f"sum({once(rate('vllm:spec_decode_num_drafts_total', JOB))})",
                ),
                "fleet",
            ),
            "Draft tokens by drafter": plot(
                "Draft tokens verified per second, by who drafted them.",
                total(pair_rate("outrider_draft_tokens_total"), "drafter"),
                "{{drafter}}",
                unit="cps",
                stacked=True,
                empty=NO_DRAFTS,
            ),
        },
    },
)
