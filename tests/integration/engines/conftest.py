"""Engines that the tests of this package share: one decodes plainly, the other has the demo's drafter, in mode `auto`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.lora import write_adapter
from tests.support.processes import Drafter, Verifier, together


@pytest.fixture(scope="package")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Known to both engines."""
    return write_adapter(tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="package")
def engines(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[dict[str, Verifier]]:
    """By mode."""
    directory = tmp_path_factory.mktemp("e")
    settings: dict[str, Any] = {
        "num_speculative_tokens": 4,
        "verifier": {
            "max_num_seqs": 16,
            "adapters": {"a": str(adapter)},
            # Prompts, and tokens that were emitted elsewhere, take several chunks of prefill.
            "engine_args": {"max_num_batched_tokens": 80, "max_logprobs": -1},
        },
    }
    started = (partial(Verifier, directory, settings | {"mode": mode}) for mode in ("off", "auto"))
    with together(*started, partial(Drafter, directory)) as (off, auto, drafter):
        auto.set_drafters(drafter.ref)
        yield {"off": off, "auto": auto}


@pytest.fixture(scope="package")
def plain(engines: dict[str, Verifier]) -> Verifier:
    return engines["off"]


@pytest.fixture(params=["off", "auto"])
def verifier(request: pytest.FixtureRequest, engines: dict[str, Verifier]) -> Verifier:
    """Either of them."""
    return engines[request.param]
