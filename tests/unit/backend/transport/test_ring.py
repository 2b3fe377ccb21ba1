"""The shared-memory ring: what is read is what was written, nothing unread is overwritten, and nothing outlives its users."""

import os
import subprocess
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backend.drafter.service import DrafterService
from backend.engine import feature_link
from backend.engine.features import FeatureShipper
from backend.fleet import DrafterRef
from backend.transport import RingReader, RingWriter, Wire
from backend.transport.ring import RingRef
from backend.wire import drafting as wire
from tests.support.ahead_verifier import HEAD, AheadVerifier, drafts_of, handle, opening
from tests.support.drafter_heads import make_proposer
from tests.support.properties import examples
from tests.support.rows import run_step, step_of


def content(number: int, size: int) -> bytes:
    return bytes((number * 31 + i) % 251 for i in range(size))


@examples(200)
@given(st.lists(st.one_of(st.integers(0, 120), st.sampled_from(["read", "lost"])), max_size=60))
def test_unread_data_is_never_overwritten(events: list[int | str]) -> None:
    writer = RingWriter(100)
    reader = RingReader(writer.ref)
    unread: deque[tuple[int, bytes]] = deque()
    for number, event in enumerate(events):
        if event == "read" and unread:
            position, data = unread.popleft()
            assert reader.read(position, len(data)) == data
        elif event == "lost" and unread:
            unread.popleft()  # Its message was dropped: it is never read.
        elif isinstance(event, int):
            data = content(number, event)
            written = writer.write(data[: event // 3], memoryview(data)[event // 3 :])
            if written is not None:
                unread.append((written, data))
            else:
                assert unread or event > 100 or "lost" in events, "an empty ring has room for all that it can hold"
    for position, data in unread:
        assert reader.read(position, len(data)) == data
    reader.close()
    writer.close()


def test_only_the_ring_that_was_meant_is_mapped(tmp_path: Path) -> None:
    writer, other = RingWriter(4096), RingWriter(4096)
    forged = msgspec.structs.replace
    for bad in (
        forged(writer.ref, fd=other.ref.fd),
        forged(writer.ref, capacity=8192),
        forged(writer.ref, token=b"x"),
        forged(writer.ref, capacity=0),
        forged(writer.ref, pid=-1),
    ):
        with pytest.raises(ValueError, match=r"segment|ring"):
            RingReader(bad)
    with open(tmp_path / "file", "w") as file, pytest.raises(ValueError, match="not a ring"):
        RingReader(forged(writer.ref, fd=file.fileno()))
    with pytest.raises(OSError, match="No such file"):
        RingReader(forged(writer.ref, pid=2**22 - 1))
    with pytest.raises(PermissionError):
        os.ftruncate(writer.ref.fd, 10)
    writer.close()
    other.close()


@pytest.mark.parametrize(("position", "size"), [(-1, 3), (4095, 2), (0, 4097), (0, -1), (2**63, 1)])
def test_a_position_outside_is_refused(position: int, size: int) -> None:
    with (
        closing(RingWriter(4096)) as writer,
        closing(RingReader(writer.ref)) as reader,
        pytest.raises(ValueError, match="outside"),
    ):
        reader.read(position, size)


def test_a_writer_that_is_killed_leaves_a_readable_ring() -> None:
    code = (
        "import sys, msgspec; from backend.transport import RingWriter; w = RingWriter(4096); at = w.write(b'last words'); "
        "sys.stdout.write(msgspec.json.encode([w.ref, at]).decode() + '\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    ref, position = msgspec.json.decode(child.stdout.readline(), type=tuple[RingRef, int])
    reader = RingReader(ref)
    child.kill()
    child.communicate()
    assert reader.read(position, 10) == b"last words"
    with pytest.raises(OSError, match=r"."):
        RingReader(ref)
    reader.close()


def verifier_of(directory: Path, ring: RingRef | None) -> tuple[AheadVerifier, bool]:
    """A verifier that has told a drafter of its ring, and whether the drafter reads that."""
    verifier = AheadVerifier(DrafterService("d0", make_proposer(directory, HEAD), 60.0))
    hello = wire.Hello(wire.PROTOCOL_VERSION, "v", "features", 1, ring)
    ((_, payload),) = handle(verifier.service, verifier.features, [wire.encode(hello)])
    welcome = wire.decode_to_verifier(payload)
    assert isinstance(welcome, wire.Welcome)
    return verifier, welcome.ring


def test_rounds_through_the_ring_are_drafted_for_alike(tmp_path: Path) -> None:
    opened, asked = opening(), wire.NextItem("a", 6, 4, [], 0, fresh_k=4)
    writer = RingWriter(4096)
    (plain, is_read), (ringed, is_ring_read) = verifier_of(tmp_path / "a", None), verifier_of(tmp_path / "b", writer.ref)
    assert (is_read, is_ring_read) == (False, True)

    def ring(verifier: AheadVerifier, at: int | None) -> list[tuple[bytes, bytes]]:
        header = wire.encode(wire.Round("float32", HEAD.hidden, [opened], at))
        return handle(verifier.service, verifier.features, [header, b""])

    plain.receive_round(opened)
    assert ring(ringed, writer.write(plain.frames(opened)[1])) == []
    expected, got = (drafts_of(each.next(asked)) for each in (plain, ringed))
    assert expected == got
    assert len(got[0].tokens) == 4
    # Outside the ring, or in a ring that nobody has mapped: then the sender has to hear that it is to greet again.
    for verifier, at, listener in ((ringed, 4000, ringed.drafts), (ringed, -3, ringed.drafts), (plain, 0, plain.features)):
        ((told, refused),) = ring(verifier, at)
        answer = wire.decode_to_verifier(refused)
        assert isinstance(answer, wire.Refused)
        assert (told, answer == wire.Refused(wire.HELLO_FIRST)) == (listener, verifier is plain)
    writer.close()
    assert not verifier_of(tmp_path / "c", writer.ref)[1], "it is gone"


def test_the_shipper_uses_the_ring_once_it_is_read_and_only_for_large_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, inbox = list[list[bytes]](), deque[list[bytes]]()

    def send(*frames: bytes) -> bool:
        sent.append([bytes(frame) for frame in frames])
        return True

    peer = Mock(send=send, receive=lambda: inbox.popleft() if inbox else None)
    monkeypatch.setattr(feature_link, "connect_dealer", lambda *_: None)
    monkeypatch.setattr(feature_link, "Dealer", lambda _: peer)
    monkeypatch.setattr(feature_link, "RING_FROM_BYTES", 1024)
    shipper = FeatureShipper(lambda head: None, ring_bytes=2048)
    shipper.set_drafters(Wire(), "v", {DrafterRef("d0", "i", "ipc:///nowhere", "", 1): 1})
    hello = wire.decode_to_drafter(sent.pop()[0])
    assert isinstance(hello, wire.Hello)
    assert hello.ring is not None
    reader = RingReader(hello.ring)

    def ship(start: int, rows: int) -> tuple[wire.Round, bytes]:
        run_step(shipper, step_of([("a", start, rows, range(100))]), [torch.full((rows, 16), float(start))])
        message = wire.decode_to_drafter(sent[-1][0])
        assert isinstance(message, wire.Round)
        return message, sent[-1][1]

    message, frame = ship(0, 20)
    assert (message.at, len(frame)) == (None, 20 * 64), "not before the drafter has said that it reads the ring"
    inbox.append([wire.encode(wire.Welcome(ring=True))])
    message, frame = ship(20, 20)
    assert frame == b""
    assert message.at is not None
    assert torch.frombuffer(reader.read(message.at, 20 * 64), dtype=torch.float32).tolist() == [20.0] * 320
    assert ship(40, 4)[0].at is None, "small ones are quicker in the message"
    assert ship(44, 20)[0].at is not None
    assert ship(64, 20)[0].at is None, "no room: the drafter has not read the last one"
    run_step(shipper, step_of([("b", 0, 4, range(100))]), [torch.zeros(4, 16)])
    inbox.append([wire.encode(wire.Refused(wire.HELLO_FIRST))])
    monkeypatch.setattr(feature_link, "GREET_EVERY_S", 0.0)
    sent.clear()
    closed, opened = ship(84, 20)[0].items
    assert closed == wire.Close("b", "moved"), "only the connection may have been lost"
    assert isinstance(opened, wire.Open), "which also ends what was there"
    again = wire.decode_to_drafter(sent[0][0])
    assert isinstance(again, wire.Hello)
    assert again.ring is not None
    assert again.ring != hello.ring, "a fresh ring for a drafter that forgot"
    reader.close()
    shipper.set_drafters(Wire(), "v", {DrafterRef("d1", "i", "tcp://127.0.0.1:1", "", 1): 2})
    far = wire.decode_to_drafter(sent[-1][0])
    assert isinstance(far, wire.Hello)
    assert far.ring is None, "not between hosts"
    shipper.set_drafters(Wire(), "v", {})
