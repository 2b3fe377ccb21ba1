"""One served fleet for all tests of this package."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.collector import Collector
from tests.support.fleet_process import ServedFleet


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
def home() -> Iterator[Path]:
    """Where the fleet keeps its files, and commands look for it; short, as Ray's sockets live below it."""
    directory = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(directory))
        patch.setenv("XDG_RUNTIME_DIR", str(directory))
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="package")
def fleet(collector: Collector, home: Path) -> Iterator[ServedFleet]:
    # Only requests that come with a trace are traced.
    tracing = ("--tracing-endpoint", collector.url)
    fleet = ServedFleet(
        "--mode",
        "sync",
        "--ray-namespace",
        f"served-{os.getpid()}",
        *tracing,
        env={"OTEL_TRACES_SAMPLER": "parentbased_always_off"},
    )
    yield fleet
    fleet.stop()


@pytest.fixture(scope="package")
def client(fleet: ServedFleet) -> OpenAI:
    return OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture
async def later(fleet: ServedFleet) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0)
