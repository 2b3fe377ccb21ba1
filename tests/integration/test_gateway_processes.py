"""Several gateway processes on one port: `outrider serve --gateways 2` with two verifiers, as a user would run it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import ssl
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from backend.config.sources import ConfigError, load
from gateway.auth.key_ring import make_key
from gateway.peers import Peers, merged
from tests.support.fake_verifier import eventually
from tests.support.fleet_process import ServedFleet, wait_for
from tests.support.lora import write_adapter

pytestmark = pytest.mark.engine

FRESH = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
"""Each request goes over a connection of its own, which either process may get."""
ADMIN = {"authorization": "Bearer adm"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


@pytest.fixture(scope="module")
def first_key(keys: Path) -> str:
    key, entry = make_key("first")
    keys.write_text("keys:\n" + entry)
    return key


@pytest.fixture(scope="module")
def fleet(keys: Path, first_key: str) -> Iterator[ServedFleet]:
    flags = {
        "gateways": 2,
        "mode": "off",
        "verifiers": 2,
        "drafters": 0,
        "gateway-admin-key": "adm",
        "verifier-adapters-loadable": "true",
        "gateway-keys-file": keys,
        "gateway-state-dir": keys.parent,
    }
    served = ServedFleet(*(word for name, value in flags.items() for word in (f"--{name}", str(value))))
    yield served
    served.stop()


def samples(fleet: ServedFleet, name: str, label: str) -> dict[str, float]:
    """A metric's samples by one label."""
    families = text_string_to_metric_families(FRESH.get(f"{fleet.url}/metrics").text)
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


def test_both_serve_and_load_stays_balanced(fleet: ServedFleet, first_key: str) -> None:
    wait_for(lambda: len(gateway_pids(fleet, first_key)) == 2)
    before = samples(fleet, "outrider_verifier_tokens_total", "verifier")

    def ask(number: int) -> str:
        answer = post(fleet, first_key, prompt=f"def f{number}(", max_tokens=16, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-request-id"]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(96)))
    by_gateway = samples(fleet, "outrider_generated_tokens_total", "gateway")
    assert len(by_gateway) == 2
    assert sum(by_gateway.values()) == 96 * 16
    # A fair hash gives one of the two fewer than 28 of 96 connections once in 25,000 runs.
    assert min(by_gateway.values()) >= 28 * 16
    wait_for(lambda: sum(samples(fleet, "outrider_verifier_tokens_total", "verifier").values()) >= 96 * 16)
    after = samples(fleet, "outrider_verifier_tokens_total", "verifier")
    gained = [after[name] - before.get(name, 0) for name in after]
    assert len(gained) == 2
    # Each gateway knows of the other what the verifiers reported a moment ago.
    assert min(gained) >= 0.3 * sum(gained), gained


def test_counters_of_one_port_never_fall(fleet: ServedFleet, first_key: str) -> None:
    last: dict[tuple[str, str], float] = {}
    for number in range(12):
        assert post(fleet, first_key, prompt=f"{number}", max_tokens=2).status_code == 200
        families = text_string_to_metric_families(FRESH.get(f"{fleet.url}/metrics").text)
        now = {(s.name, str(s.labels)): s.value for f in families if f.type == "counter" for s in f.samples}
        assert all(now[series] >= value for series, value in last.items())
        last = now


def test_a_reload_reaches_all(fleet: ServedFleet, first_key: str, keys: Path) -> None:
    second, entry = make_key("second")
    old = keys.read_text()
    keys.write_text(old + entry)
    done = FRESH.post(f"{fleet.url}/admin/reload", json={}, headers=ADMIN)
    assert (done.status_code, done.json()["keys"]) == (200, 2)
    assert {post(fleet, second, prompt="x", max_tokens=1).status_code for _ in range(16)} == {200}
    keys.write_text(old)
    os.kill(fleet.process.pid, signal.SIGHUP)
    wait_for(lambda: {post(fleet, second, prompt="x", max_tokens=1).status_code for _ in range(16)} == {401})


def test_background_responses_are_cancelled_and_followed_through_any(fleet: ServedFleet, first_key: str) -> None:
    """Either process is asked; which one makes a response does not matter."""
    for _ in range(6):
        made = post(fleet, first_key, "/v1/responses", input="hi", background=True, max_output_tokens=400).json()
        url = f"{fleet.url}/v1/responses/{made['id']}"
        assert FRESH.post(f"{url}/cancel", headers=bearer(first_key)).json()["status"] in (
            "cancelled",
            "completed",
            "incomplete",
        )
    streamed = post(fleet, first_key, "/v1/responses", input="hi", background=True, stream=True, max_output_tokens=8).text
    response_id = streamed.partition('"id":"')[2].partition('"')[0]
    for _ in range(6):
        url = f"{fleet.url}/v1/responses/{response_id}?stream=true"
        assert FRESH.get(url, headers=bearer(first_key)).text == streamed.replace(": \n\n", "")


def test_an_adapter_that_one_loads_all_have(fleet: ServedFleet, first_key: str, tmp_path: Path) -> None:
    def seen() -> set[int]:
        return {post(fleet, first_key, model="sql", prompt="def f(", max_tokens=2).status_code for _ in range(12)}

    asked = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    loaded = FRESH.post(f"{fleet.url}/v1/load_lora_adapter", json=asked, headers=ADMIN)
    assert loaded.status_code == 200, loaded.text
    assert seen() == {200}
    assert FRESH.post(f"{fleet.url}/v1/unload_lora_adapter", json={"lora_name": "sql"}, headers=ADMIN).status_code == 200
    assert seen() == {404}


@pytest.mark.campaign
def test_one_that_dies_is_started_again_and_the_other_goes_on(fleet: ServedFleet, first_key: str, tmp_path: Path) -> None:
    first = fleet.process.pid
    asked = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    assert FRESH.post(f"{fleet.url}/v1/load_lora_adapter", json=asked, headers=ADMIN).status_code == 200
    victim = next(pid for pid in gateway_pids(fleet, first_key).values() if pid != first)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: FRESH.get(f"{fleet.url}/readyz").status_code == 503)
    assert {post(fleet, first_key, prompt="x", max_tokens=1).status_code for _ in range(8)} == {200}
    wait_for(lambda: FRESH.get(f"{fleet.url}/readyz").status_code == 200)
    wait_for(lambda: victim not in gateway_pids(fleet, first_key).values() and len(gateway_pids(fleet, first_key)) == 2)
    # What was loaded before, the new one has asked for.
    assert {post(fleet, first_key, model="sql", prompt="x", max_tokens=1).status_code for _ in range(12)} == {200}


def test_the_end_drains_all(fleet: ServedFleet, first_key: str) -> None:
    pids = gateway_pids(fleet, first_key).values()
    body = {"model": "demo", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        # Connections of their own, so that either process has some.
        streams = [
            stack.enter_context(FRESH.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=bearer(first_key)))
            for _ in range(8)
        ]
        fleet.process.send_signal(signal.SIGTERM)
        assert all(each.read().endswith(b"data: [DONE]\n\n") for each in streams)
    assert fleet.process.wait(60) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_a_process_that_cannot_be_started_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = []

    async def start(*args: str, **_: object) -> None:
        began.append(args)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("gateway.peers.BACKOFF_S", (0.001, 0.001))
    keeping = asyncio.create_task(Peers(tmp_path, 0, 2, command=lambda *_: ["x"])._keep(1, 0))
    await eventually(lambda: len(began) > 1 or keeping.done())
    assert not keeping.done()
    keeping.cancel()


def test_families_of_several_processes_stand_together() -> None:
    one = '# HELP a_total x\n# TYPE a_total counter\na_total{gateway="1"} 1\n# HELP b y\n# TYPE b gauge\nb 2\n'
    assert merged([one, one.replace('"1"', '"2"').partition("# HELP b")[0]]).count("# TYPE a_total") == 1


async def test_asking_another_process_reads_no_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **named: loaded.append(named))
    assert not await Peers(tmp_path, 0, 2).ready()
    assert not loaded


def test_a_unix_socket_is_not_shared() -> None:
    with pytest.raises(ConfigError, match="uds"):
        load(["--gateways", "2", "--gateway-uds", "/tmp/x"])
