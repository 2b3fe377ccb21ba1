"""Samples a gateway's /metrics once a second during a run, in a thread of the parent process.

The samples become `fleet.csv`, and the figures that only the server knows: acceptance length, how busy the verifiers were, and
how many requests were left after the load.
"""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from loadtest.served import FleetError, Gateway

INTERVAL_S = 1.0
COLUMNS = {
    "drafts": ("vllm:spec_decode_num_drafts_total", ""),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total", ""),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total", ""),
    "tokens": ("outrider_verifier_tokens_total", ""),
    "steps": ("outrider_verifier_steps_total", ""),
    "preemptions": ("outrider_verifier_preemptions_total", ""),
    "busy_s": ("outrider_verifier_busy_seconds_total", ""),
    "awaiting_draft_s": ("outrider_verifier_idle_seconds_total", "awaiting_draft"),
    "no_work_s": ("outrider_verifier_idle_seconds_total", "no_work"),
    "in_flight": ("outrider_requests_in_flight", ""),
    "running": ("outrider_verifier_running", ""),
    "waiting": ("outrider_verifier_waiting", ""),
}
"""By column: the metric, and the value of its label `cause` or ""; values are summed over other labels."""

Sample = dict[str, float]


def read(text: str) -> Sample:
    """The columns' values, from Prometheus' text format.  A missing metric is 0."""
    wanted = {series: column for column, series in COLUMNS.items()}
    names = tuple(name for name, _ in COLUMNS.values())
    sample = dict.fromkeys(COLUMNS, 0.0)
    # Other lines are removed first, because the parser is slow.
    for family in text_string_to_metric_families("\n".join(line for line in text.splitlines() if line.startswith(names))):
        for each in family.samples:
            column = wanted.get((each.name, each.labels.get("cause", "")))
            if column is not None:
                sample[column] += each.value
    return sample


def figures(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Acceptance length, shares of the verifiers' time and preemptions, from the first and the last sample."""
    if len(samples) < 2:
        return {}
    spent = {name: samples[-1][name] - samples[0][name] for name in COLUMNS}
    drafts, wall = spent["drafts"], spent["busy_s"] + spent["awaiting_draft_s"] + spent["no_work_s"]
    return {
        "acceptance_length": 1 + spent["accepted_tokens"] / drafts if drafts > 0 else None,
        "busy_share": spent["busy_s"] / wall if wall > 0 else None,
        "awaiting_draft_share": spent["awaiting_draft_s"] / wall if wall > 0 else None,
        "preemptions": spent["preemptions"],
    }


def left_over(sample: Mapping[str, float]) -> float:
    """Requests that the gateway or a verifier still has."""
    return sample["in_flight"] + sample["running"] + sample["waiting"]


class Watch:
    """Samples the metrics from `start` to `stop`."""

    def __init__(self, gateway: Gateway) -> None:
        self.samples: list[Sample] = []
        self._gateway = gateway
        self._stopping = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._follow, name="metrics", daemon=True)

    def start(self) -> None:
        """Takes the first sample and starts the thread.  Raises `FleetError` when the gateway does not answer."""
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and takes the last sample."""
        self._stopping.set()
        self._thread.join()
        self._try()

    def settle(self, timeout_s: float) -> float:
        """Waits until no request is left, at most `timeout_s`; returns the number of requests left."""
        deadline = time.monotonic() + timeout_s
        while (left := left_over(read(self._gateway.get("/metrics").text))) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def write(self, file: Path) -> None:
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["at_s", *COLUMNS])
            writer.writeheader()
            writer.writerows({name: round(value, 3) for name, value in sample.items()} for sample in self.samples)

    def _follow(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            self._try()

    def _try(self) -> None:
        try:
            self._sample()
        except FleetError:
            pass  # the gateway may be too busy to answer; the test goes on, and the file has a gap

    def _sample(self) -> None:
        sample = read(self._gateway.get("/metrics").text)
        sample["at_s"] = time.monotonic() - self._began
        self.samples.append(sample)
