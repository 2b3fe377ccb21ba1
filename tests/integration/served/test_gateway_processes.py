"""Several gateway processes on one port, as `outrider serve --gateways 2` starts them."""

import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.auth.key_ring import make_key
from tests.support.fleet_process import ServedFleet, wait_for
from tests.support.lora import write_adapter

pytestmark = pytest.mark.engine

FRESH = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
"""Each request goes over a connection of its own, which either process may get."""


def samples(fleet: ServedFleet, name: str, label: str) -> dict[str, float]:
    """A metric's samples by one label."""
    families = text_string_to_metric_families(FRESH.get(f"{fleet.url}/metrics", headers=fleet.headers).text)
    found: defaultdict[str, float] = defaultdict(float)
    for family in families:
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += sample.value
    return dict(found)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def post(fleet: ServedFleet, key: str, path: str = "/v1/completions", **fields: object) -> httpx.Response:
    body = {"model": "demo", "temperature": 0, **fields}
    return FRESH.post(f"{fleet.url}{path}", json=body, headers=bearer(key))


def gateway_pids(fleet: ServedFleet, key: str) -> dict[str, int]:
    """Of the gateways that `/fleet` shows as ready."""
    gateways = FRESH.get(f"{fleet.url}/fleet", headers=bearer(key)).json()["gateways"]
    return {each["id"]: each["pid"] for each in gateways if each["state"] == "ready"}


def test_both_serve(fleet: ServedFleet, first_key: str) -> None:
    wait_for(lambda: len(gateway_pids(fleet, first_key)) == 2)
    made = samples(fleet, "outrider_generated_tokens_total", "gateway")

    def ask(number: int) -> None:
        post(fleet, first_key, prompt=f"def f{number}(", max_tokens=16, ignore_eos=True).raise_for_status()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(96)))
    by_gateway = {
        name: tokens - made.get(name, 0)
        for name, tokens in samples(fleet, "outrider_generated_tokens_total", "gateway").items()
    }
    assert len(by_gateway) == 2
    assert sum(by_gateway.values()) == 96 * 16
    # A fair hash gives one of the two fewer than 28 of 96 connections once in 25,000 runs.
    assert min(by_gateway.values()) >= 28 * 16


def test_a_reload_reaches_all(fleet: ServedFleet, first_key: str, keys: Path) -> None:
    second, entry = make_key("second")
    old = keys.read_text()
    keys.write_text(old + entry)
    done = FRESH.post(f"{fleet.url}/admin/reload", json={}, headers=fleet.headers)
    assert (done.status_code, done.json()["keys"]) == (200, 3)
    assert {post(fleet, second, prompt="x", max_tokens=1).status_code for _ in range(16)} == {200}
    keys.write_text(old)
    os.kill(fleet.process.pid, signal.SIGHUP)
    wait_for(lambda: {post(fleet, second, prompt="x", max_tokens=1).status_code for _ in range(16)} == {401})


def test_an_adapter_that_one_loads_all_have(fleet: ServedFleet, first_key: str, tmp_path: Path) -> None:
    def seen() -> set[int]:
        return {post(fleet, first_key, model="sql", prompt="def f(", max_tokens=2).status_code for _ in range(12)}

    adapter = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    loaded = FRESH.post(f"{fleet.url}/v1/load_lora_adapter", json=adapter, headers=fleet.headers)
    assert loaded.status_code == 200, loaded.text
    assert seen() == {200}
    assert (
        FRESH.post(f"{fleet.url}/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=fleet.headers).status_code == 200
    )
    assert seen() == {404}


@pytest.mark.campaign
def test_one_that_dies_is_started_again_and_the_other_goes_on(fleet: ServedFleet, first_key: str, tmp_path: Path) -> None:
    first = fleet.process.pid
    adapter = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    assert FRESH.post(f"{fleet.url}/v1/load_lora_adapter", json=adapter, headers=fleet.headers).status_code == 200
    victim = next(pid for pid in gateway_pids(fleet, first_key).values() if pid != first)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: FRESH.get(f"{fleet.url}/readyz").status_code == 503)
    assert {post(fleet, first_key, prompt="x", max_tokens=1).status_code for _ in range(8)} == {200}
    wait_for(lambda: FRESH.get(f"{fleet.url}/readyz").status_code == 200)
    wait_for(lambda: victim not in gateway_pids(fleet, first_key).values() and len(gateway_pids(fleet, first_key)) == 2)
    # What was loaded before, the new one has asked for.
    assert {post(fleet, first_key, model="sql", prompt="x", max_tokens=1).status_code for _ in range(12)} == {200}
