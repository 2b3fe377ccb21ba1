"""What only the server knows, from its /metrics: acceptance length, and how many requests it still has."""

import time
from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
IN_FLIGHT = ("outrider_requests_in_flight", "outrider_verifier_running", "outrider_verifier_waiting")
TIMEOUT_S = 10.0
SETTLE_S = 15.0
"""How long requests may take to leave the server after the load."""


def parse(text: str) -> dict[str, float]:
    """The metrics used here, each summed over its labels, from Prometheus' text format.  A missing metric is 0."""
    sums = dict.fromkeys((DRAFTS, ACCEPTED, *IN_FLIGHT), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    return sums


def read(http: httpx.Client) -> dict[str, float]:
    """The metrics of a running gateway.  Raises `httpx.HTTPError`."""
    return parse(http.get("/metrics", timeout=TIMEOUT_S).raise_for_status().text)


def acceptance_length(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """`acceptance_length` between two readings, if anything was drafted."""
    drafts = after[DRAFTS] - before[DRAFTS] if before else 0
    return {"acceptance_length": 1 + (after[ACCEPTED] - before[ACCEPTED]) / drafts} if drafts > 0 else {}


def left_over(http: httpx.Client) -> float:
    """Waits until no request is left, at most `SETTLE_S`; returns the number left.  Raises `httpx.HTTPError`."""
    deadline = time.monotonic() + SETTLE_S
    while (left := sum(read(http)[name] for name in IN_FLIGHT)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
