"""One served fleet for all tests of this package: two verifiers, the drafter of both, two gateway processes, and keys."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.auth.key_ring import make_key
from tests.support.collector import Collector
from tests.support.fleet_process import ROOT, ServedFleet, home_of_fleets

KEY = "unused"
"""An administrator's.  The examples in README have it."""


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="package")
def home() -> Iterator[Path]:
    with home_of_fleets() as directory:
        yield directory


@pytest.fixture(scope="package")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


@pytest.fixture(scope="package")
def first_key(keys: Path) -> str:
    key, entry = make_key("first")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.write_text(f"keys:\n  - {{name: trainer, sha256: {digest}, rights: [admin, metrics]}}\n{entry}")
    return key


@pytest.fixture(scope="package")
def fleet(collector: Collector, home: Path, keys: Path, first_key: str) -> Iterator[ServedFleet]:
    flags = {
        "gateways": 2,
        "mode": "sync",
        "verifiers": 2,
        "drafters": 1,
        "verifier-adapters-loadable": "true",
        "verifier-engine-args": json.dumps({"logits_processors": ["tests.support.standing:Standing"]}),
        "gateway-keys-file": keys,
        "gateway-state-dir": keys.parent,
        # Only requests that come with a trace are traced.
        "tracing-endpoint": collector.url,
        "ray-namespace": f"served-{os.getpid()}",
    }
    words = (word for name, value in flags.items() for word in (f"--{name}", str(value)))
    env = {"OTEL_TRACES_SAMPLER": "parentbased_always_off", "PYTHONPATH": str(ROOT)}
    with ServedFleet(*words, env=env, key=KEY) as fleet:
        # Or the coordinator has it serve now one of them, now both.
        both = {"drafter": "drafter-0", "verifiers": ["verifier-0", "verifier-1"]}
        fleet.http.post("/admin/assign", json=both).raise_for_status()
        yield fleet
