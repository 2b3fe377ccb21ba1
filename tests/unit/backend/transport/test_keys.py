"""Who is let in at a server socket: the fleet's own over tcp, this node's processes over ipc, nobody else."""

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from backend.fleet import Member, reached_at
from backend.transport import Hub, ServerKeys, ServerSocket, Wire, new_server_keys
from backend.transport.sockets import bind_router
from tests.support.fleet_process import wait_for

FLEET, SERVER = new_server_keys(), new_server_keys()
WAIT_MS = 5000
SILENCE_MS = 500
"""A friend's answer takes a few milliseconds; a stranger gets none in this time."""


class Echo:
    """A server on a thread of its own that answers everything, as verifiers and drafters hold theirs."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[bytes] = []
        self.refused = 0
        self.local_address = f"ipc://{directory}/local.sock"
        self._hub = Hub(Wire(FLEET))
        self._router = self._hub.router("tcp://127.0.0.1:0", SERVER, self.local_address)
        self.address = self._router.address
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self._hub.poll(0.05)
            while (message := self._router.receive()) is not None:
                self.heard += message[1]
                self._router.send(message[0], b"echo", *message[1])
            self.refused = self._router.connections_refused()
        self._hub.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    server = Echo(tmp_path)
    yield server
    server.close()


def says(address: str, word: bytes, wait_ms: int, client: ServerKeys | None = None, server_key: str = "") -> list[bytes] | None:
    """What a raw peer is answered; None: nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if client is not None:
            dealer.curve_serverkey = server_key.encode()
            dealer.curve_publickey, dealer.curve_secretkey = client.public.encode(), client.secret.encode()
        dealer.sndtimeo = wait_ms
        dealer.connect(address)
        try:
            dealer.send(word)
        except zmq.Again:
            return None  # turned away before it has said anything: there is no connection to say it on
        return dealer.recv_multipart() if dealer.poll(wait_ms) else None


def test_the_fleets_key_is_let_in_over_tcp(echo: Echo) -> None:
    assert says(echo.address, b"friend", WAIT_MS, FLEET, SERVER.public) == [b"echo", b"friend"]
    assert echo.refused == 0


@pytest.mark.parametrize(
    ("client", "server_key"),
    [
        pytest.param(new_server_keys(), SERVER.public, id="another client's key"),
        pytest.param(SERVER, SERVER.public, id="the server's own key"),
        pytest.param(FLEET, new_server_keys().public, id="another server's key"),
        pytest.param(None, "", id="no key"),
    ],
)
def test_anybody_else_gets_nothing_changes_nothing_and_is_counted(
    echo: Echo, client: ServerKeys | None, server_key: str
) -> None:
    before = echo.refused
    assert says(echo.address, b"stranger", SILENCE_MS, client, server_key) is None
    wait_for(lambda: echo.refused > before, what="the stranger being counted")
    assert says(echo.address, b"friend", WAIT_MS, FLEET, SERVER.public) == [b"echo", b"friend"]
    assert echo.heard == [b"friend"]


def test_within_the_node_the_directory_protects_and_no_key_is_asked_for(echo: Echo) -> None:
    assert says(echo.local_address, b"neighbour", WAIT_MS) == [b"echo", b"neighbour"]


def test_who_talks_to_the_port_like_a_browser_does_no_harm(echo: Echo) -> None:
    host, port = echo.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert says(echo.address, b"friend", WAIT_MS, FLEET, SERVER.public) == [b"echo", b"friend"]


def member(node_id: str, local_address: str) -> Member:
    return Member("d0", "drafter", "i", "tcp://10.0.0.2:5", "key", "10.0.0.2", 1, "m", "ready", "", node_id, local_address)


def test_only_a_process_of_the_same_node_goes_by_ipc(tmp_path: Path) -> None:
    usable = tmp_path / "d.sock"
    usable.touch()
    near = member("n2", f"ipc://{usable}")
    assert reached_at(near, "n2") == f"ipc://{usable}"
    assert reached_at(near, "n1") == reached_at(member("", ""), "") == "tcp://10.0.0.2:5"
    assert Wire(FLEET, node_id="n2").route(near) == f"ipc://{usable}"
    assert Wire(FLEET, node_id="n1").route(near) == "tcp://10.0.0.2:5"
    assert Wire(FLEET, node_id="n2").route(member("n2", f"ipc://{tmp_path}/gone.sock")) == "tcp://10.0.0.2:5"


def test_ports_come_from_the_range_until_it_is_used_up() -> None:
    wire = Wire(FLEET)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{first}-{first + 1}"
    made = []
    try:
        for expected in (first, first + 1):
            bound, reached = bind_router(wire, address, SERVER)
            made.append(bound)
            assert reached == f"tcp://127.0.0.1:{expected}"
        with pytest.raises(OSError, match="cannot listen") as refused:
            bind_router(wire, address, SERVER)
        assert isinstance(refused.value.__cause__, zmq.ZMQError)
        assert refused.value.__cause__.errno == errno.EADDRINUSE
    finally:
        for each in made:
            each.close()
        wire.close()


def test_an_interface_stands_for_its_address_and_ipv6_is_an_address() -> None:
    for wanted, expected in (("tcp://lo:0", "tcp://127.0.0.1:"), ("tcp://[::1]:0", "tcp://[::1]:")):
        hub = Hub(Wire(FLEET))
        try:
            router: ServerSocket = hub.router(wanted, SERVER)
            assert router.address.startswith(expected)
        finally:
            hub.close()
