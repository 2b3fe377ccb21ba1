"""The drafting process over real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from backend.config.settings import DraftingSettings
from backend.drafter.loop import DrafterLoop
from backend.drafter.process import DrafterModel, DrafterProcess
from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.models.head_config import CheckpointError
from backend.transport.hub import Dealer, Hub
from backend.transport.sockets import Wire, new_server_keys
from backend.wire.drafting import (
    PROTOCOL_VERSION,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Role,
    Round,
    ToVerifier,
    Welcome,
    decode_to_verifier,
    encode,
)
from tests.support.drafter_heads import TinyHead, write_head, write_target
from tests.support.other_vocabulary import write_permuted

HEAD = TinyHead()
SETTINGS = DraftingSettings(gpus=0, cache_tokens=1024)


class Peer:
    """A verifier's two sockets."""

    def __init__(self, address: str, name: str, wire: Wire | None = None, server_key: str = "") -> None:
        self.hub = Hub(wire or Wire())
        self.name = name
        self.features = self.hub.dealer(address, server_key)
        self.drafts = self.hub.dealer(address, server_key)

    def greet(self) -> None:
        pairs: list[tuple[Dealer, Role]] = [(self.features, "features"), (self.drafts, "drafts")]
        for socket, role in pairs:
            assert socket.send(encode(Hello(PROTOCOL_VERSION, self.name, role, 1)))
            assert isinstance(self.receive(socket), Welcome)

    def receive(self, socket: Dealer, timeout_s: float = 10.0) -> ToVerifier:
        if not socket.socket.poll(int(timeout_s * 1000)):
            raise TimeoutError
        frames = socket.receive()
        assert frames is not None
        return decode_to_verifier(frames[0])


@pytest.fixture
def model(tmp_path: Path) -> DrafterModel:
    head = write_head(tmp_path / "head", HEAD, "speculators")
    return DrafterModel(write_target(tmp_path / "target", HEAD), head, head)


@pytest.fixture
def start() -> Iterator[Callable[[DrafterProcess], DrafterProcess]]:
    """Starts a process until the test is over."""
    with ExitStack() as stack:

        def started(process: DrafterProcess) -> DrafterProcess:
            process.start()
            stack.callback(process.stop)
            return process

        yield started


@pytest.fixture
def process(tmp_path: Path, model: DrafterModel, start: Any) -> DrafterProcess:
    return start(DrafterProcess("drafter-0", model, SETTINGS, f"ipc://{tmp_path}/d.sock"))


def test_stopping_removes_the_socket_and_is_idempotent(process: DrafterProcess) -> None:
    path = Path(process.address.removeprefix("ipc://"))
    assert path.exists()
    process.stop()
    process.stop()
    assert not process.is_alive
    assert not path.exists()
    assert process.stats().drafter_id == "drafter-0"


def test_the_fleets_keys_are_needed_over_tcp(model: DrafterModel, start: Any) -> None:
    fleet, server = new_server_keys(), new_server_keys()
    with pytest.raises(ValueError, match="CURVE"):
        DrafterProcess("drafter-0", model, SETTINGS, "tcp://127.0.0.1:0")
    process = start(DrafterProcess("drafter-0", model, SETTINGS, "tcp://127.0.0.1:0", Wire(fleet), server))
    friend = Peer(process.address, "friend", Wire(fleet), server.public)
    stranger = Peer(process.address, "stranger", Wire(new_server_keys()), server.public)
    friend.greet()
    stranger.features.send(encode(Hello(PROTOCOL_VERSION, "stranger", "features", 1)))
    with pytest.raises(TimeoutError):
        stranger.receive(stranger.features, 0.3)


def test_an_exchange_that_was_given_up_does_not_happen_later() -> None:
    service, hub = Mock(has_work=False), Mock()
    loop = DrafterLoop(hub, Mock(receive=Mock(return_value=None), connections_refused=Mock(return_value=0)), service)
    with pytest.raises(TimeoutError):
        loop.replace(Mock(), 0.01)
    hub.poll.side_effect = lambda _: loop.stop()
    loop.run()
    service.replace.assert_not_called()


def test_a_crash_is_reported(tmp_path: Path, model: DrafterModel, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed = threading.Event()
    monkeypatch.setattr("backend.drafter.service.DrafterService.receive", lambda *_: 1 / 0)
    process = start(DrafterProcess("drafter-0", model, SETTINGS, f"ipc://{tmp_path}/d.sock", on_crash=crashed.set))
    peer = Peer(process.address, "v")
    peer.features.send(b"anything")
    assert crashed.wait(10)


def test_a_drafter_with_a_gpu_says_why_it_cannot_use_it(
    tmp_path: Path, model: DrafterModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=RuntimeError("no driver")))
    with pytest.raises(RuntimeError, match="no driver"):
        DrafterProcess("drafter-0", model, SETTINGS.model_copy(update={"gpus": 0.5}), f"ipc://{tmp_path}/g.sock")


def test_a_draft_model_with_other_ids_drafts_the_same_once_loaded_and_one_with_other_tokens_is_refused(
    tmp_path: Path, start: Any
) -> None:
    model = DrafterModel(str(TARGET_DIR), str(DRAFT_MODEL_DIR))
    process = start(DrafterProcess("drafter-0", model, SETTINGS, f"ipc://{tmp_path}/m.sock"))
    peer = Peer(process.address, "v")

    def drafted() -> list[int]:
        peer.greet()
        peer.features.send(encode(Round("float32", 0, [Open("r", 6, [0, 271, 300, 290, 310, 280], 0)])), b"")
        assert peer.drafts.send(encode(Next([NextItem("r", 6, 4, [], 0)])))
        answer = peer.receive(peer.drafts)
        assert isinstance(answer, Drafts)
        return answer.items[0].tokens

    before = drafted()
    assert len(before) == 4
    process.swap_head(str(write_permuted(DRAFT_MODEL_DIR, tmp_path / "permuted")))
    assert drafted() == before
    with pytest.raises(CheckpointError, match="strange: another vocabulary"):
        process.swap_head(str(write_permuted(DRAFT_MODEL_DIR, tmp_path / "strange", range(1100))))
    assert drafted() == before


def test_what_does_not_fit_into_memory_beside_the_present_model_is_refused(
    process: DrafterProcess, model: DrafterModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("backend.drafter.process.build_proposer", Mock(side_effect=torch.OutOfMemoryError("CUDA")))
    with pytest.raises(CheckpointError, match="no memory"):
        process.swap_head(str(model.head_dir))
    process._adopt(process._newest)
    assert "does not follow its target's new weights" in caplog.text


def test_without_features_a_head_is_refused(tmp_path: Path, model: DrafterModel, start: Any) -> None:
    process = start(DrafterProcess("d", DrafterModel(model.target_dir, None), SETTINGS, f"ipc://{tmp_path}/n.sock"))
    with pytest.raises(CheckpointError, match="send no features"):
        process.swap_head(str(model.head_dir))
