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
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

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

    @property
    def records(self) -> Recording | None:
        return next((each for each in self.observers if isinstance(each, Recording)), None)


class Verifier:
    """A port whose socket is two lists, with an engine that only schedules."""

    def __init__(self, files: list[Row] | None = None, router: Any = None) -> None:
        self.scheduler = Scheduler()
        self.aborted: list[str] = []
        self._inbox: list[tuple[bytes, list[Any]]] = []
        self.sent: list[tuple[bytes, bytes, bytes]] = []
        config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 100))
        core: Any = SimpleNamespace(scheduler=self.scheduler, vllm_config=config, abort_requests=self.aborted.extend)
        weights: Any = SimpleNamespace(loaded=None)
        welcome = EngineWelcome(ENGINE_WIRE_VERSION, "v", "i", 64, 8, 16, [])
        self.port = GatewayPort(router or self, core, welcome, files.append if files is not None else None, weights)  # type: ignore[arg-type]

    def receive(self) -> tuple[bytes, list[Any]] | None:
        return self._inbox.pop(0) if self._inbox else None

    def send(self, identity: bytes, kind: bytes, payload: bytes = b"") -> bool:
        self.sent.append((identity, kind, payload))
        return True

    def hear(self, identity: bytes, frames: list[Any], now: float) -> None:
        self._inbox.append((identity, frames))
        self.port.receive(now)

    def rows(self, identity: bytes, now: float) -> RowBatch:
        self.hear(identity, SPEECH.call(1, "take_rows", []), now)
        to, *answer = self.sent[-1]
        assert to == identity
        return msgspec.msgpack.decode(SPEECH.hear(answer).utility_output.result.result, type=RowBatch)


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
        verifier.scheduler.requests["r"] = SimpleNamespace(client_index=1)
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
    core: Any = Mock()
    core.model_executor.sleeping_tags = {"weights"}
    port = GatewayPort(Mock(), core, Mock(), None, WeightControl(core, "/t", True))
    port.send_outputs = Mock()  # type: ignore[method-assign]
    port._utility(Mock(index=1), 7, method, [3])
    (sent,) = port.send_outputs.call_args.args
    assert sent[1].utility_output.failure_message == "ValueError: wake the weights up first"
    getattr(core, method).assert_not_called()


@pytest.mark.parametrize(("lease_s", "known"), [(GATEWAY_LEASE_S, False), (60.0, True), (math.inf, True)])
def test_a_silent_client_is_known_for_as_long_as_it_said(lease_s: float, known: bool) -> None:
    verifier = Verifier()
    verifier.hear(b"c", SPEECH.hello("c", lease_s), 0.0)
    verifier.scheduler.requests["r"] = SimpleNamespace(client_index=1)
    verifier.port.expire(GATEWAY_LEASE_S)
    assert verifier.aborted == []
    verifier.port.expire(GATEWAY_LEASE_S + 1)
    assert verifier.aborted == ([] if known else ["r"])
    verifier.hear(b"c", SPEECH.ping(), 12.0)
    assert (verifier.sent[-1][1] == REFUSED) != known


def test_rows_are_made_while_a_client_takes_them() -> None:
    verifier = Verifier()
    verifier.hear(b"gateway", SPEECH.hello("gateway"), 0.0)
    verifier.hear(b"rollout", SPEECH.hello("rollout"), 5.0)
    assert verifier.scheduler.records is None
    assert len(verifier.rows(b"rollout", 5.0)) == 0
    assert verifier.scheduler.records is not None
    verifier.scheduler.records.put(ROW)
    assert verifier.rows(b"rollout", 5.0).verifications == [ROW]
    assert len(verifier.rows(b"rollout", 5.0)) == 0
    verifier.port.expire(12.0)
    assert verifier.scheduler.records is not None, "only the gateway was silent for too long"
    verifier.port.expire(16.0)
    assert verifier.scheduler.records is None


def test_rows_are_kept_for_a_client_that_has_connected_anew() -> None:
    verifier = Verifier()
    for connection, now in ((b"first", 0.0), (b"second", 5.0)):
        verifier.hear(connection, SPEECH.hello("rollout"), now)
        verifier.rows(connection, now)
    assert verifier.scheduler.records is not None
    verifier.scheduler.records.put(ROW)
    verifier.port.expire(12.0)
    assert verifier.rows(b"second", 12.0).verifications == [ROW]


def test_files_get_every_row_in_any_case() -> None:
    files: list[Row] = []
    verifier = Verifier(files)
    recording = verifier.scheduler.records
    assert recording is not None
    recording.put(ROW)
    verifier.hear(b"rollout", SPEECH.hello("rollout"), 0.0)
    verifier.rows(b"rollout", 0.0)
    recording.put(ROW)
    assert verifier.rows(b"rollout", 0.0).verifications == [ROW]
    verifier.port.expire(11.0)
    recording.put(ROW)
    assert files == [ROW] * 3
    assert verifier.scheduler.records is recording, "steps go on being counted"
