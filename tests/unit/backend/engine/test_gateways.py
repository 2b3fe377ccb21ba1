"""The verifier's side of the engine wire: how long a silent client is known, and for whom rows are made."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import vllm  # noqa: F401  (must be the first of vLLM's modules)
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, UtilityOutput

from backend.engine.client import EngineCodec
from backend.engine.counting import CountingScheduler
from backend.engine.gateways import GatewayPort
from backend.engine.recording import Recording
from backend.engine.weights import WeightControl
from backend.records.kept import RowBatch
from backend.records.rows import Row, VerificationRow
from backend.transport import Hub, Wire
from backend.wire.engine import ENGINE_WIRE_VERSION, GATEWAY_LEASE_S, REFUSED, WELCOME, EngineWelcome, Refusal

ROW = VerificationRow(3, "r", 10, 4, 2, 3, "drafter-0", False, False)
SPEECH = EngineCodec()


class Scheduler(CountingScheduler):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Any] = {}


class Verifier:
    """A port whose socket is two lists, with an engine that only schedules."""

    def __init__(self, files: list[Row] | None = None, router: Any = None) -> None:
        self.aborted: list[str] = []
        self.inbox: list[tuple[bytes, list[Any]]] = []
        self.sent: list[tuple[bytes, bytes, bytes]] = []
        self.core: Any = Mock(scheduler=Scheduler(), abort_requests=self.aborted.extend)
        self.core.vllm_config.model_config.get_vocab_size = lambda: 100
        self.core.model_executor.sleeping_tags = set()
        welcome = EngineWelcome(ENGINE_WIRE_VERSION, "v", "i", 64, 8, 16, [])
        put = files.append if files is not None else None
        self.port = GatewayPort(router or self, self.core, welcome, put, WeightControl(self.core, "/t", True))  # type: ignore[arg-type]

    @property
    def recording(self) -> Recording | None:
        return next((each for each in self.core.scheduler.observers if isinstance(each, Recording)), None)

    def receive(self) -> tuple[bytes, list[Any]] | None:
        return self.inbox.pop(0) if self.inbox else None

    def send(self, identity: bytes, kind: bytes, payload: bytes = b"") -> bool:
        self.sent.append((identity, kind, payload))
        return True

    def hear(self, identity: bytes, frames: list[Any], now: float) -> None:
        self.inbox.append((identity, frames))
        self.port.receive(now)

    def call(self, identity: bytes, now: float, method: str, *arguments: Any) -> UtilityOutput:
        self.hear(identity, SPEECH.call(1, method, [*arguments]), now)
        to, *answer = self.sent[-1]
        assert to == identity
        return SPEECH.hear(answer).utility_output

    def rows(self, identity: bytes, now: float) -> RowBatch:
        return msgspec.msgpack.decode(self.call(identity, now, "take_rows").result.result, type=RowBatch)


def test_a_gateway_that_does_not_read_is_told_so_and_never_misses_tokens_in_between(tmp_path: Path) -> None:
    """It gets outputs up to some step, and then a refusal, after which it sends its requests elsewhere."""
    hub = Hub(Wire())
    router = hub.router(f"ipc://{tmp_path}/verifier")
    verifier = Verifier(router=router)
    gateway = hub.wire.context.socket(zmq.DEALER)
    gateway.linger, gateway.rcvhwm = 0, 1
    gateway.connect(router.address)
    try:
        gateway.send_multipart(SPEECH.hello("gateway"))
        hub.poll(5.0)
        verifier.port.receive(0.0)
        assert gateway.recv_multipart()[0] == WELCOME
        verifier.core.scheduler.requests["r"] = SimpleNamespace(client_index=1)
        steps = 0
        while verifier.aborted != ["r"]:
            output = EngineCoreOutput("r", [steps], stop_reason="x" * 8192)
            verifier.port.send_outputs({1: EngineCoreOutputs(outputs=[output])})
            steps += 1
            assert steps < 5000, "no sign of a full queue"
        heard: list[Any] = []
        while not heard or not isinstance(heard[-1], Refusal):
            if gateway.poll(50):
                heard.append(SPEECH.hear(gateway.recv_multipart()))
            else:
                gateway.send_multipart(SPEECH.ping())
                hub.poll(5.0)
                verifier.port.receive(0.0)
        steps_heard = [each.outputs[0].new_token_ids[0] for each in heard if isinstance(each, EngineCoreOutputs)]
        assert steps_heard == list(range(steps - 1))
        assert heard[-1].reason == "unknown"
    finally:
        gateway.close()
        hub.close()


@pytest.mark.parametrize("method", ["add_lora", "remove_lora"])
def test_adapters_are_refused_while_the_weights_sleep(method: str) -> None:
    """They would be written into memory that has been given up."""
    verifier = Verifier()
    verifier.core.model_executor.sleeping_tags = {"weights"}
    verifier.hear(b"gateway", SPEECH.hello("gateway"), 0.0)
    assert verifier.call(b"gateway", 0.0, method, 3).failure_message == "ValueError: wake the weights up first"
    getattr(verifier.core, method).assert_not_called()


@pytest.mark.parametrize(("lease_s", "known"), [(GATEWAY_LEASE_S, False), (60.0, True), (math.inf, True)])
def test_a_silent_client_is_known_for_as_long_as_it_said(lease_s: float, known: bool) -> None:
    verifier = Verifier()
    verifier.hear(b"c", SPEECH.hello("c", lease_s), 0.0)
    verifier.core.scheduler.requests["r"] = SimpleNamespace(client_index=1)
    verifier.port.expire(GATEWAY_LEASE_S)
    assert verifier.aborted == []
    verifier.port.expire(GATEWAY_LEASE_S + 1)
    assert verifier.aborted == ([] if known else ["r"])
    verifier.hear(b"c", SPEECH.ping(), 12.0)
    assert (verifier.sent[-1][1] == REFUSED) != known


def test_loading_weights_costs_no_gateway_its_lease_nor_do_the_pings_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def load(self: WeightControl, path: str | None = None) -> None:
        clock.now += 60.0

    monkeypatch.setattr("backend.engine.gateways.time", clock)
    monkeypatch.setattr(WeightControl, "reload_weights", load)
    verifier = Verifier()
    verifier.hear(b"a", SPEECH.hello("a"), 0.0)
    # All of it is read at once, when the engine thread has time.
    verifier.inbox.append((b"a", SPEECH.call(1, "reload_weights", ["/new"])))
    verifier.inbox += [(b"a", SPEECH.ping()), (b"b", SPEECH.hello("b"))]
    assert verifier.port.receive(0.0) == 60.0
    verifier.port.expire(clock.now)
    for name in (b"a", b"b"):
        verifier.hear(name, SPEECH.ping(), clock.now)
        assert verifier.sent[-1][1] != REFUSED


@pytest.mark.parametrize("files", [None, list[Row]()], ids=["no files", "files"])
def test_rows_are_made_while_a_client_takes_them_and_for_files_in_any_case(files: list[Row] | None) -> None:
    """They are kept for a client that has connected anew."""
    verifier = Verifier(files)

    def put() -> Recording:
        assert verifier.recording is not None
        verifier.recording.put(ROW)
        return verifier.recording

    assert (verifier.recording is None) == (files is None)
    for name, now in ((b"gateway", 0.0), (b"first", 0.0), (b"second", 5.0)):
        verifier.hear(name, SPEECH.hello(name.decode()), now)
    assert len(verifier.rows(b"first", 0.0)) == len(verifier.rows(b"second", 5.0)) == 0
    recording = put()
    assert verifier.rows(b"second", 5.0).verifications == [ROW]
    assert len(verifier.rows(b"second", 5.0)) == 0
    put()
    verifier.port.expire(12.0)
    assert verifier.rows(b"second", 12.0).verifications == [ROW], "the others were silent for too long"
    verifier.port.expire(23.0)
    assert verifier.recording is (None if files is None else recording), "steps go on being counted"
    if files is not None:
        put()
        assert files == [ROW] * 3
