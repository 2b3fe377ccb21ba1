"""Connections that are cut, or made anew while nobody reads."""

import contextlib
import socket
import threading
import time
from pathlib import Path

from backend.transport import Hub, Wire, connect_dealer


def carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)


def carry_all(listener: socket.socket, server: str, clients: list[socket.socket]) -> None:
    """Carries connections to a server.  When a client's connection ends, the server's end of it stays open, and silent."""
    with contextlib.suppress(OSError):
        while True:
            front, back = listener.accept()[0], socket.socket(socket.AF_UNIX)
            back.connect(server)
            clients.append(front)
            for source, sink in ((front, back), (back, front)):
                threading.Thread(target=carry, args=(source, sink), daemon=True).start()


def test_a_client_is_heard_again_before_the_server_knows_that_it_was_cut(tmp_path: Path) -> None:
    clients: list[socket.socket] = []
    with (
        contextlib.closing(Hub(Wire())) as theirs,
        contextlib.closing(Hub(Wire())) as ours,
        socket.socket(socket.AF_UNIX) as between,
    ):
        router = theirs.router(f"ipc://{tmp_path}/server")
        between.bind(f"{tmp_path}/between")
        between.listen()
        threading.Thread(target=carry_all, args=(between, f"{tmp_path}/server", clients), daemon=True).start()
        dealer = ours.dealer(f"ipc://{tmp_path}/between")
        dealer.send(b"first")
        theirs.poll(60.0)
        assert router.receive() is not None
        clients[0].shutdown(socket.SHUT_RDWR)
        until, again = time.monotonic() + 60.0, None
        while again is None and time.monotonic() < until:
            dealer.send(b"again")
            theirs.poll(0.05)
            again = router.receive()
        assert again is not None, "the server ignores the new connection"
        assert router.send(again[0], b"welcome")
        assert ours.poll(60.0)
        assert dealer.receive() == [b"welcome"]
        between.shutdown(socket.SHUT_RDWR)


def test_a_peer_that_is_gone_is_no_error(tmp_path: Path) -> None:
    with contextlib.closing(Hub(Wire())) as hub:
        assert hub.router(f"ipc://{tmp_path}/server").send(b"nobody", b"hello")


def test_a_client_that_does_not_read_for_long_is_sent_all_that_it_asked_for(tmp_path: Path) -> None:
    """Its inbox is unbounded.  With a full one, a connection is made anew because heartbeats go unread, and libzmq (4.3.5) then
    ends the process (`Assertion failed: _input_stopped`).
    """
    count = 20_000
    with contextlib.closing(Hub(Wire())) as hub:
        router = hub.router(f"ipc://{tmp_path}/server")
        dealer = connect_dealer(hub.wire, router.address, high_water_mark=8)
        dealer.send(b"here")
        hub.poll(60.0)
        heard = router.receive()
        assert heard is not None
        until, sent = time.monotonic() + 60.0, 0
        while sent < count and time.monotonic() < until:
            sent += router.send(heard[0], bytes(64))
        assert sent == count
        assert [dealer.recv() for _ in range(count)] == [bytes(64)] * count
