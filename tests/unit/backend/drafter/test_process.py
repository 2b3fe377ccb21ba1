"""The drafting process over real sockets, and the kinds of drafters: a new one without weights is an entry and a file."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from backend.config import DraftingSettings, Settings
from backend.drafter.loop import DrafterLoop
from backend.drafter.ngram import NgramProposer
from backend.drafter.process import DrafterModel, DrafterProcess, build_proposer
from backend.drafter.proposer import DraftRequest, Until
from backend.launch.plan import Hardware, plan
from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.models.head_config import CheckpointError
from backend.models.kinds import KINDS, WEIGHTLESS, Kind
from backend.models.resolve import ModelError, resolve
from backend.transport.hub import Dealer, Hub
from backend.transport.sockets import Wire, new_server_keys
from backend.wire.drafting import (
    HELLO_FIRST,
    PROTOCOL_VERSION,
    Drafts,
    Hello,
    Next,
    NextItem,
    Open,
    Refused,
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
        assert peer.drafts.send(encode(Next([NextItem("r", 6, 4, [], 0, fresh_k=4)])))
        answer = peer.receive(peer.drafts)
        assert isinstance(answer, Drafts)
        return answer.items[0].tokens

    before = drafted()
    assert len(before) == 4
    process.swap_head(str(write_permuted(DRAFT_MODEL_DIR, tmp_path / "permuted")))
    assert [peer.receive(socket) for socket in (peer.features, peer.drafts)] == 2 * [Refused(HELLO_FIRST)]
    assert drafted() == before
    with pytest.raises(CheckpointError, match="strange: another vocabulary"):
        process.swap_head(str(write_permuted(DRAFT_MODEL_DIR, tmp_path / "strange", range(1100))))
    assert drafted() == before


def test_new_weights_are_tried_again_whatever_has_failed_and_a_new_head_is_refused(
    process: DrafterProcess, model: DrafterModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_memory = torch.OutOfMemoryError("CUDA")
    faults = [no_memory, no_memory, RuntimeError("capture\nfailed"), OSError("gone")]
    build = Mock(side_effect=[*faults, DEFAULT], wraps=build_proposer)
    monkeypatch.setattr("backend.drafter.process.build_proposer", build)
    monkeypatch.setattr("backend.drafter.process.RETRY_S", 0.0)
    with pytest.raises(CheckpointError, match="no memory for it beside the present model"):
        process.swap_head(str(model.head_dir))
    before = process._service.proposer
    process._adopt(process._newest)
    assert process._service.proposer is not before
    lines = [record.getMessage() for record in caplog.records]
    assert ["does not follow its target's new weights yet" in line and "\n" not in line for line in lines] == [True] * 3
    build.side_effect = RuntimeError("capture")
    process.stop()
    process._adopt(process._newest)
    assert len(caplog.records) == 4, "a drafter that stops gives up"


def test_without_features_a_head_is_refused(tmp_path: Path, model: DrafterModel, start: Any) -> None:
    process = start(DrafterProcess("d", DrafterModel(model.target_dir, None), SETTINGS, f"ipc://{tmp_path}/n.sock"))
    with pytest.raises(CheckpointError, match="send no features"):
        process.swap_head(str(model.head_dir))


class Silent(NgramProposer):
    """A kind that the fleet does not know."""


def test_a_new_kind_is_resolved_placed_built_and_refused_where_it_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Kind], KINDS), "silent", Kind(f"{__name__}:Silent"))
    monkeypatch.setitem(cast(dict[str, str], WEIGHTLESS), "silent", "silent")
    settings = Settings.model_validate({"mode": "sync", "drafter": "silent"})
    models = resolve(settings, print)
    assert (models.drafter_kind, models.drafter_dir) == ("silent", None)
    decided = plan(settings, models, Hardware(cores=[0, 1], gpus=1.0, local=True), tmp_path)
    assert [member.num_gpus for member in decided.members] == [1.0, 0.0], "it computes on no device"
    own = models.drafter("drafter-0")
    assert not own.takes_features
    assert isinstance(build_proposer(DrafterModel(str(TARGET_DIR), own.directory, kind=own.kind), DraftingSettings()), Silent)
    for changes, line in (
        ({"mode": "native", "drafter": "silent"}, "native cannot draft with silent"),
        ({"drafter": "silent,ngram", "drafters": 2, "drafting": {"learning": "on"}}, "needs an EAGLE head"),
    ):
        with pytest.raises(ModelError, match=line):
            resolve(Settings.model_validate(changes), print)


def test_look_ups_need_no_sizes_of_the_target(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    proposer = build_proposer(DrafterModel(str(tmp_path), None), DraftingSettings())
    assert (proposer.vocab_size, proposer.max_position) == (2**31, 2**31)
    proposer.open("r", [262_207, 5, 6, 7, 262_207, 5, 6], 0)
    assert proposer.draft([DraftRequest("r", 7, 0, None, Until(2))])[0].tokens == [7, 262_207]
