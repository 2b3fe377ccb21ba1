"""Connections that are cut, or made anew while nobody reads."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from backend.transport import Hub, Wire


class OneSided:
    """Carries connections to a server.  `cut` ends a client's connection; the server's end of it stays open, and silent."""

    def __init__(self, path: Path, server: str) -> None:
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._fronts: list[socket.socket] = []
        self._backs: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for front in self._fronts:
            front.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in (self._listener, *self._fronts, *self._backs):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                front, back = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                back.connect(self._server)
                self._fronts.append(front)
                self._backs.append(back)
                for source, sink in ((front, back), (back, front)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)


def test_a_client_is_heard_again_before_the_server_knows_that_it_was_cut(tmp_path: Path) -> None:
    theirs, ours = Hub(Wire()), Hub(Wire())
    router = theirs.router(f"ipc://{tmp_path}/server")
    between = OneSided(tmp_path / "between", f"{tmp_path}/server")
    try:
        dealer = ours.dealer(f"ipc://{tmp_path}/between")
        dealer.send(b"first")
        theirs.poll(60.0)
        heard = router.receive()
        assert heard is not None
        between.cut()
        until, again = time.monotonic() + 60.0, None
        while again is None and time.monotonic() < until:
            dealer.send(b"again")
            theirs.poll(0.05)
            again = router.receive()
        assert again is not None, "the server ignores the new connection"
        assert router.send(again[0], b"welcome")
        assert ours.poll(60.0)
        assert dealer.receive() == [b"welcome"]
    finally:
        between.close()
        ours.close()
        theirs.close()


def test_a_peer_that_is_gone_is_no_error(tmp_path: Path) -> None:
    hub = Hub(Wire())
    try:
        assert hub.router(f"ipc://{tmp_path}/server").send(b"nobody", b"hello")
    finally:
        hub.close()


SCRIPT = """
import sys, time
import zmq
from backend.transport import sockets

sockets.HEARTBEAT_MS, sockets.HEARTBEAT_TIMEOUT_MS = 20, 60
wire = sockets.Wire()
router, address = sockets.bind_router(wire, "ipc://" + sys.argv[1], high_water_mark=0)
dealer = sockets.connect_dealer(wire, address, high_water_mark=8)
dealer.send(b"here")
identity = router.recv_multipart()[0]
read = 0
for _ in range(10):
    for _ in range(200):
        router.send_multipart((identity, bytes(64)))
    time.sleep(0.2)  # so that heartbeats go unread, and the connection is made anew
    try:
        while True:
            dealer.recv(zmq.NOBLOCK)
            read += 1
            if read % 50 == 0:
                time.sleep(0.005)
    except zmq.Again:
        pass
print(read)
dealer.close()
router.close()
wire.close()
"""


def test_messages_that_are_not_read_for_longer_than_the_heartbeats_last_end_no_process(tmp_path: Path) -> None:
    """libzmq (4.3.5) ends the process (`Assertion failed: _input_stopped`) when a connection whose inbox was full is made anew
    because heartbeats went unread, and its messages are then read.  Run in a process of its own, which would die of it.
    """
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "s")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
