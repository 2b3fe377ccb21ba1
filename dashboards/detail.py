"""The dashboards of verifiers and of the assignment of drafters.  Pure data."""

from __future__ import annotations

from dashboards.expr import (
    JOB,
    VERIFIER,
    acceptance_length,
    drafter_gauge,
    drafter_rate,
    once,
    or_zero,
    pair_rate,
    pair_ratio,
    ratio,
    total,
    verifier_gauge,
    verifier_rate,
)
from dashboards.model import Dashboard, Panel
from dashboards.overview import BUSY, IDLE
from dashboards.shapes import NO_DRAFTS, NO_TRAFFIC, count, length, plot, share, stacked

NO_DRAFTERS = "no drafter"
_STEPS = verifier_rate("outrider_verifier_steps_total")
_LOAD = f"({verifier_gauge('outrider_verifier_running')} + {verifier_gauge('outrider_verifier_waiting')})"
_MEMBERS = once(f"outrider_fleet_members{{{JOB}}}", "kind", "state")


def _per_step(about: str, metric: str, unit: str = "short") -> Panel:
    return plot(about, ratio(verifier_rate(metric), _STEPS), unit=unit, empty=NO_TRAFFIC)


VERIFIERS = Dashboard(
    "outrider-verifiers",
    "Outrider: verifiers",
    "Load, steps and time of each verifier.",
    {
        "Time": {
            "Busy": share("Share of time in steps.", verifier_rate(BUSY)),
            **{
                f"Idle: {words}": share(about, verifier_rate(IDLE, labels=f'{VERIFIER}, cause="{cause}"'))
                for cause, words, about in (
                    ("no_work", "no work", "Share of time without a single request."),
                    ("awaiting_draft", "waiting for drafts", "Share of time with requests, all of which wait for drafts."),
                    ("swap", "swap", "Share of time waiting for memory to be swapped."),
                )
            },
            "Steps": plot("Engine steps per second.", _STEPS, unit="ops"),
        },
        "Steps": {
            "Step time": _per_step("Busy time per step.", BUSY, unit="s"),
            "Verify time": _per_step(
                "Target forward and sampling per step; the rest of a step is scheduling and sending.",
                "outrider_verifier_verify_seconds_total",
                unit="s",
            ),
            "Sequences per step": _per_step(
                "Sequences verified in one step: the batch as the hardware sees it.", "outrider_verifier_verifications_total"
            ),
            "Tokens per step": _per_step("Tokens emitted in one step.", "outrider_verifier_tokens_total"),
            "Tokens": plot("Tokens emitted per second.", verifier_rate("outrider_verifier_tokens_total"), unit="cps"),
            "Prefill": plot(
                "Tokens computed for prompts per second, and for what moved sequences bring along.",
                verifier_rate("outrider_verifier_prefill_tokens_total"),
                unit="cps",
            ),
            "Time in steps with prefill": share(
                "Share of time; the sequences that decode in such a step wait longer for their next token.",
                verifier_rate("outrider_verifier_prefill_seconds_total"),
            ),
            "Prompt tokens": plot(
                "Prompt tokens per second, of sequences that began decoding.",
                verifier_rate("outrider_verifier_prompt_tokens_total"),
                unit="cps",
            ),
        },
        "Load": {
            "Running": plot("Sequences in the batch.", verifier_gauge("outrider_verifier_running")),
            "Waiting": plot("Sequences waiting to enter the batch.", verifier_gauge("outrider_verifier_waiting")),
            "Tokens in flight": plot(
                "Tokens held by running and waiting sequences, prompts included.",
                verifier_gauge("outrider_verifier_tokens_in_flight"),
            ),
            "KV cache": share(
                "Share of the KV cache in use.", verifier_gauge("outrider_verifier_kv_cache_usage"), thresholds=[(0.95, "red")]
            ),
            "Preemptions": plot(
                "Sequences preempted for KV cache space, per minute; each is computed again.",
                f"60 * {verifier_rate('outrider_verifier_preemptions_total')}",
            ),
            "Sequences finished": stacked(
                "Per second, by vLLM's finish reason.",
                total(verifier_rate("outrider_verifier_requests_finished_total", "reason"), "reason"),
                "reason",
            ),
        },
        "Who they are": {
            "Verifiers": Panel(
                "Model, mode and node of every verifier.",
                {"": once(f'outrider_verifier_info{{{VERIFIER}, model=~"$model"}}', "verifier", "model", "mode", "node")},
                kind="table",
            )
        },
    },
)

ASSIGNMENT = Dashboard(
    "outrider-assignment",
    "Outrider: assignment",
    "Who drafts for whom, and whether the work is spread well.",
    {
        "Members": {
            "Members by state": count(
                "What the coordinator knows, by kind and state.", f"{_MEMBERS} > 0", "{{kind}} {{state}}", stacked=True
            ),
            "Drafters in use by verifier": count(
                "Drafters whose drafts the verifier verified of late.",
                or_zero(f"count by (verifier) ({pair_rate('outrider_drafts_total')} > 0)"),
            ),
            "Verifiers in use by drafter": count(
                "Verifiers that verified the drafter's drafts of late.",
                or_zero(f"count by (drafter) ({pair_rate('outrider_drafts_total')} > 0)"),
                "{{drafter}}",
            ),
        },
        "Pairs": {
            "Drafts by pair": plot(
                "Drafts verified per second; where one line ends and another begins, a drafter was moved.",
                f"{pair_rate('outrider_drafts_total')} > 0",
                "{{verifier}} < {{drafter}}",
                unit="ops",
                width=12,
                height=9,
                stacked=True,
                empty=NO_DRAFTS,
            ),
            "Acceptance length by drafter": length(
                "Of the sums over its verifiers: is one head worse than the others?",
                acceptance_length("drafter"),
                "{{drafter}}",
                width=12,
                height=9,
            ),
            "Queue at the drafter": plot(
                "Mean wait per round in the drafter's queue; long where it serves too many.",
                pair_ratio("outrider_draft_queue_seconds_total", "outrider_draft_rounds_total", "drafter"),
                "{{drafter}}",
                unit="s",
                empty=NO_DRAFTS,
            ),
            "Drafters not waited for": count(
                "Assigned drafters whose circuit breaker is open, by verifier.",
                verifier_gauge("outrider_drafters_down"),
                thresholds=[(1, "red")],
            ),
        },
        "Drafters": {
            "Drafters' time": Panel(
                "Share of time in which a drafter computed, and in batches that drafted. "
                "The rest reads prompts or drafts ahead.",
                {
                    "{{drafter}} busy": drafter_rate("outrider_drafter_busy_seconds_total"),
                    "{{drafter}} drafting": drafter_rate("outrider_drafter_draft_seconds_total"),
                },
                unit="percentunit",
                high=1,
                empty=NO_DRAFTERS,
            ),
            "Requests per draft batch": plot(
                "Requests that one batch of a drafter drafted for.",
                ratio(drafter_rate("outrider_drafter_drafts_total"), drafter_rate("outrider_drafter_batches_total")),
                "{{drafter}}",
                empty=NO_DRAFTS,
            ),
            "Drafters' KV cache": share(
                "Share of each drafter's KV cache in use.",
                drafter_gauge("outrider_drafter_kv_cache_usage"),
                "{{drafter}}",
                empty=NO_DRAFTERS,
            ),
            "Drafters' sequences": count(
                "Sequences in each drafter's KV cache.",
                drafter_gauge("outrider_drafter_sequences"),
                "{{drafter}}",
                empty=NO_DRAFTERS,
            ),
            "Drafters' evictions and refusals": Panel(
                "Per minute: sequences removed from the KV cache to make room, and messages that a drafter could not use.",
                {
                    "{{drafter}} evictions": f"60 * {drafter_rate('outrider_drafter_evictions_total')}",
                    "{{drafter}} refusals": f"60 * {drafter_rate('outrider_drafter_rejected_total')}",
                },
                empty=NO_DRAFTERS,
            ),
        },
        "Hand-over": {
            "Requests handed over": plot(
                "Running requests given to a drafter with their earlier features, per minute: after a new assignment.",
                f"60 * {pair_rate('outrider_handovers_total')}",
                "{{verifier}} > {{drafter}}",
                empty=NO_DRAFTS,
            ),
            "Positions per hand-over": plot(
                "Features sent along, per request handed over; the drafter has a gap for what is missing.",
                pair_ratio("outrider_handover_rows_total", "outrider_handovers_total"),
                "positions",
                empty="nothing was handed over",
            ),
            "Hand-over traffic": plot(
                "Bytes per second, part of what is sent to drafters.",
                pair_rate("outrider_handover_bytes_total"),
                "{{verifier}} > {{drafter}}",
                unit="Bps",
                empty=NO_DRAFTS,
            ),
        },
        "Balance": {
            "Load gap": plot(
                "Sequences running and waiting at the most loaded verifier less those at the least loaded.",
                f"max({_LOAD}) - min({_LOAD})",
                "gap",
            ),
            "Running by verifier": plot("Sequences in each batch.", verifier_gauge("outrider_verifier_running")),
            "Idle while others queue": count(
                "Verifiers that are without work while sequences wait somewhere.",
                f"count({verifier_gauge('outrider_verifier_running')} == 0) "
                f"and (sum({verifier_gauge('outrider_verifier_waiting')}) > 0) or on() vector(0)",
                "verifiers",
                thresholds=[(1, "orange")],
            ),
        },
    },
)
