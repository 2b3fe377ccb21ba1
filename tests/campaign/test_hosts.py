"""A fleet on two machines: the verifier on one, the drafter on the other, tcp with CURVE in between.

The machines are namespaces (`tests/campaign/machines.py`), with a Ray node each; the test itself is a third one, with no keys.
"""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import zmq

from backend.engine.front import VLLM_VERSION
from backend.fleet import FleetSnapshot
from backend.transport import ServerKeys, new_server_keys
from backend.wire.drafting import PROTOCOL_VERSION, Hello, encode
from backend.wire.engine import ENGINE_WIRE_VERSION, HELLO, EngineHello
from tests.campaign.machines import Network, RayMachines, missing
from tests.support.fleet_process import ServedFleet, wait_for

pytestmark = [
    pytest.mark.engine,
    pytest.mark.campaign,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=f"{missing()}"),
]

PROMPTS = ["def read_lines(path):\n    ", "class Stack:\n    def __init__(self):\n", "import os\nimport sys\n", "for i in "]
TOKENS = 128
PORTS = "20000-20009"
PORT = 20000
"""Each machine has one member, which takes the first of them."""
OUTAGE_S = 6.0
"""Longer than heartbeats and leases wait, shorter than Ray does before it gives a node up."""
NAMESPACE = "hosts"


@dataclass
class Hosts:
    """What the tests get hold of."""

    machines: RayMachines
    fleet: ServedFleet

    def snapshot(self) -> FleetSnapshot:
        """As `outrider status` shows it on the head, which finds the fleet that runs there."""
        output = self.machines.head.run(sys.executable, "-m", "gateway.cli", "status", "--json", env=self.machines.env)
        return msgspec.json.decode(output, type=FleetSnapshot)

    def drafts(self) -> float:
        """Drafts of the remote drafter that were verified, so far."""
        return self.fleet.metric("outrider_drafts_total", drafter="drafter-0")


def completed(fleet: ServedFleet, prompt: str, tokens: int = TOKENS) -> str:
    return str(fleet.complete(prompt, max_tokens=tokens, ignore_eos=True)["choices"][0]["text"])


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What one host answers, without any drafter."""
    with ServedFleet("--mode", "off", "--ray-namespace", "hosts-alone") as alone:
        return {prompt: completed(alone, prompt) for prompt in PROMPTS}


@pytest.fixture(scope="module")
def hosts(expected: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    log = tmp_path_factory.mktemp("hosts") / "machines.log"
    with log.open("w") as stream, closing(Network(stream)) as made:
        machines = RayMachines(made)
        with ServedFleet(
            *("--mode", "sync", "--verifier-lookup", "false"),
            *("--verifier-engine-args", '{"additional_config": {"outrider": {"draft_deadline_s": 1}}}'),
            *("--ray-address", machines.ray_address, "--ray-namespace", NAMESPACE),
            *("--host", machines.head.address, "--transport-ports", PORTS),
            *("--verifier-ray-resources", '{"verifying": 0.1}', "--drafting-ray-resources", '{"drafting": 0.1}'),
            prefix=machines.head.enter,
            env=machines.env,
        ) as fleet:
            yield Hosts(machines, fleet)
            assert fleet.stop() == 0


def test_drafts_cross_and_the_text_is_that_of_one_host(hosts: Hosts, expected: dict[str, str]) -> None:
    head, worker = hosts.machines.head, hosts.machines.worker
    shown = hosts.fleet.fleet()
    assert [(m["id"], m["node"]) for m in shown["verifiers"] + shown["drafters"]] == [
        ("verifier-0", head.address),
        ("drafter-0", worker.address),
    ]
    assert {prompt: completed(hosts.fleet, prompt) for prompt in PROMPTS} == expected
    wait_for(lambda: hosts.drafts() > 0, what="drafts that count")
    assert hosts.fleet.metric("outrider_accepted_tokens_total", drafter="drafter-0") > len(PROMPTS) * TOKENS / 3
    # By features from the verifier's worker, and drafts to its scheduler; who has no keys is turned away there (see below).
    assert worker.connections(PORT) == {head.address}
    # The gateway shares the verifier's node: it needs no tcp.
    assert head.connections(PORT) == set()


def test_a_further_gateway_on_the_other_machine(hosts: Hosts, expected: dict[str, str]) -> None:
    head, worker = hosts.machines.head, hosts.machines.worker
    place = ("--ray-address", hosts.machines.ray_address, "--ray-namespace", NAMESPACE, "--host", worker.address)
    with ServedFleet(*place, command="gateway", prefix=worker.enter, env=hosts.machines.env) as second:
        wait_for(lambda: second.http.get("/readyz").status_code == 200, what="a verifier for the second gateway")
        assert {prompt: completed(second, prompt) for prompt in PROMPTS} == expected
        assert head.connections(PORT) == {worker.address}
        assert second.stop() == 0


def test_wrong_keys_get_nothing_and_change_nothing(hosts: Hosts, expected: dict[str, str]) -> None:
    members = {view.member.id: view.member for view in hosts.snapshot().members}
    assert members["verifier-0"].address == f"tcp://{hosts.machines.head.address}:{PORT}"
    assert members["drafter-0"].address == f"tcp://{hosts.machines.worker.address}:{PORT}"
    gateway_hello = [HELLO, msgspec.msgpack.encode(EngineHello(ENGINE_WIRE_VERSION, VLLM_VERSION, "stranger"))]
    drafting_hello = [encode(Hello(PROTOCOL_VERSION, "stranger", "drafts", 1))]
    for name, hello in (("verifier-0", gateway_hello), ("drafter-0", drafting_hello)):
        member = members[name]

        def refused(name: str = name) -> float:
            return hosts.fleet.metric("outrider_connections_refused_total", member=name)

        strangers: list[tuple[ServerKeys | None, str]] = [
            (new_server_keys(), member.server_key),
            (new_server_keys(), new_server_keys().public),
            (None, ""),
        ]
        for keys, server_key in strangers:
            before = refused()
            assert knock(member.address, hello, keys, server_key, lambda before=before: refused() > before) is None
    assert {prompt: completed(hosts.fleet, prompt) for prompt in PROMPTS} == expected
    shown = hosts.fleet.fleet()
    assert [each["verifiers"] for each in shown["drafters"]] == [["verifier-0"]]


def knock(address: str, frames: list[bytes], keys: ServerKeys | None, server_key: str, until: Any) -> list[bytes] | None:
    """A raw peer says hello, and waits for an answer until it was turned away for certain, and a second longer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if keys is not None:
            dealer.curve_serverkey = server_key.encode()
            dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret.encode()
        dealer.connect(address)
        dealer.send_multipart(frames)
        wait_for(until, what="a refusal")
        return dealer.recv_multipart() if dealer.poll(1000) else None


def streams(fleet: ServedFleet, pool: ThreadPoolExecutor, tokens: int) -> tuple[dict[str, Future[str]], dict[str, list[str]]]:
    """A streamed completion of each prompt, and the pieces of it that have come."""
    heard: dict[str, list[str]] = {prompt: [] for prompt in PROMPTS}
    return {prompt: pool.submit(fleet.stream, prompt, heard[prompt].append, max_tokens=tokens) for prompt in PROMPTS}, heard


def test_a_link_that_fails_costs_speed_alone(hosts: Hosts, expected: dict[str, str]) -> None:
    longer = 1500
    undisturbed = {prompt: completed(hosts.fleet, prompt, longer) for prompt in PROMPTS}
    before = hosts.drafts()
    pool = ThreadPoolExecutor(len(PROMPTS))
    running, heard = streams(hosts.fleet, pool, longer)
    wait_for(lambda: hosts.drafts() > before, what="drafts for the streams")
    worker = hosts.machines.worker
    began = time.monotonic()
    worker.plug(False)
    try:
        # What was under way arrives or is lost; then decoding is plain and goes on.
        wait_for(lambda: hosts.fleet.fleet()["drafters"][0]["state"] == "lost", what="the drafter to be missed")
        at_the_cut = hosts.drafts()
        pieces = {prompt: len(each) for prompt, each in heard.items()}
        assert {prompt: stream.result(120) for prompt, stream in running.items()} == undisturbed
        assert all(len(heard[prompt]) > count for prompt, count in pieces.items()), "ended before the cut"
        while time.monotonic() - began < OUTAGE_S:
            assert dict(zip(PROMPTS, pool.map(lambda p: completed(hosts.fleet, p), PROMPTS), strict=True)) == expected
        assert hosts.drafts() == at_the_cut
    finally:
        worker.plug(True)
    returned = time.monotonic()

    def drafted() -> bool:
        assert completed(hosts.fleet, PROMPTS[0]) == expected[PROMPTS[0]]
        return hosts.drafts() > at_the_cut

    wait_for(drafted, 60, "drafts over the link that is back")
    print(f"link away for {returned - began:.1f} s; drafted for again {time.monotonic() - returned:.1f} s after its return")
    assert {prompt: completed(hosts.fleet, prompt) for prompt in PROMPTS} == expected
    assert hosts.fleet.metric("outrider_sequences_finished_total", reason="lost") == 0


def test_a_machine_that_is_lost_and_one_that_takes_its_place(hosts: Hosts, expected: dict[str, str]) -> None:
    """The last test: the drafter's machine is gone after it."""
    running, heard = streams(hosts.fleet, ThreadPoolExecutor(len(PROMPTS)), 1000)
    wait_for(lambda: all(heard.values()), what="tokens")
    hosts.machines.worker.power_off()
    for stream in running.values():
        stream.result(120)
    assert {prompt: completed(hosts.fleet, prompt) for prompt in PROMPTS} == expected
    before, began = hosts.drafts(), time.monotonic()
    another = hosts.machines.join("drafting")

    def drafted() -> bool:
        assert completed(hosts.fleet, PROMPTS[0]) == expected[PROMPTS[0]]
        return hosts.drafts() > before

    wait_for(drafted, 180, "a drafter on the new machine")
    print(f"drafted for again {time.monotonic() - began:.1f} s after another machine joined")

    def places() -> list[str]:
        return [each["node"] for each in hosts.fleet.fleet()["drafters"] if each["state"] == "ready"]

    wait_for(lambda: places() == [another.address], what="the gateway to hear of it")
