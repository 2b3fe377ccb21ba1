"""One served fleet for all tests of this package."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.collector import Collector
from tests.support.fleet_process import ServedFleet


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
def fleet(collector: Collector) -> Iterator[ServedFleet]:
    # Only requests that come with a trace are traced.
    tracing = ("--tracing-endpoint", collector.url, "--tracing-sample-ratio", "0")
    fleet = ServedFleet("--mode", "sync", "--ray-namespace", f"served-{os.getpid()}", *tracing)
    yield fleet
    fleet.stop()
