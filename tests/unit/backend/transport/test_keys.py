"""Who is let in at a server socket: the fleet's own over tcp, this node's processes over ipc, nobody else."""

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from backend.fleet import Member
from backend.transport import Hub, ServerKeys, Wire, new_server_keys
from backend.transport.sockets import bind_router
from tests.support.fleet_process import wait_for

FLEET, SERVER = new_server_keys(), new_server_keys()
WAIT_S = 5.0
SILENCE_S = 0.5
"""A friend's answer takes a few milliseconds; a stranger gets none in this time."""


class Echo:
    """A server that answers everything, at whichever of its addresses."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[bytes] = []
        self.local_address = f"ipc://{directory}/local.sock"
        self._hub = Hub(Wire(FLEET))
        self._router = self._hub.router("tcp://127.0.0.1:0", SERVER, self.local_address)
        self.address = self._router.address
        self.refused, self.close = self._router.connections_refused, self._hub.close

    def answer(self) -> None:
        self._hub.poll(0.01)
        while (message := self._router.receive()) is not None:
            self.heard += message[1]
            self._router.send(message[0], b"echo", *message[1])


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    with closing(Echo(tmp_path)) as server:
        yield server


def says(
    echo: Echo, address: str, word: bytes, wait_s: float, client: ServerKeys | None = None, server_key: str = ""
) -> list[bytes] | None:
    """What a raw peer is answered; None: nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if client is not None:
            dealer.curve_serverkey = server_key.encode()
            dealer.curve_publickey, dealer.curve_secretkey = client.public.encode(), client.secret.encode()
        dealer.sndtimeo = round(1000 * wait_s)
        dealer.connect(address)
        with suppress(zmq.Again):  # turned away before it has said anything: there is no connection to say it on
            dealer.send(word)
        until = time.monotonic() + wait_s
        while not dealer.poll(0) and time.monotonic() < until:
            echo.answer()
        return dealer.recv_multipart() if dealer.poll(0) else None


@pytest.mark.parametrize(
    ("client", "server_key"),
    [
        pytest.param(new_server_keys(), SERVER.public, id="another client's key"),
        pytest.param(SERVER, SERVER.public, id="the server's own key"),
        pytest.param(FLEET, new_server_keys().public, id="another server's key"),
        pytest.param(None, "", id="no key"),
    ],
)
def test_anybody_but_the_fleet_gets_nothing_changes_nothing_and_is_counted(
    echo: Echo, client: ServerKeys | None, server_key: str
) -> None:
    friend = (echo, echo.address, b"friend", WAIT_S, FLEET, SERVER.public)
    assert says(*friend) == [b"echo", b"friend"]
    assert echo.refused() == 0
    assert says(echo, echo.address, b"stranger", SILENCE_S, client, server_key) is None
    wait_for(lambda: echo.refused() > 0, what="the stranger being counted")
    assert says(*friend) == [b"echo", b"friend"]
    assert echo.heard == [b"friend"] * 2


def test_within_the_node_no_key_is_asked_for_and_who_talks_like_a_browser_does_no_harm(echo: Echo) -> None:
    host, port = echo.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    assert says(echo, echo.local_address, b"neighbour", WAIT_S) == [b"echo", b"neighbour"]
    assert says(echo, echo.address, b"friend", WAIT_S, FLEET, SERVER.public) == [b"echo", b"friend"]


def member(node_id: str, local_address: str) -> Member:
    return Member("d0", "drafter", "i", "tcp://10.0.0.2:5", "key", "10.0.0.2", 1, "m", "ready", "", node_id, local_address)


def test_only_a_process_of_the_same_node_goes_by_ipc(tmp_path: Path) -> None:
    usable = tmp_path / "d.sock"
    usable.touch()
    near, gone = (member("n2", f"ipc://{path}") for path in (usable, tmp_path / "gone.sock"))
    assert Wire(FLEET, node_id="n2").route(near) == f"ipc://{usable}"
    for node_id, other in (("n1", near), ("n2", gone), ("", member("", ""))):
        assert Wire(FLEET, node_id=node_id).route(other) == "tcp://10.0.0.2:5"


def test_ports_come_from_the_range_until_it_is_used_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{first}-{first + 1}"
    with closing(Wire(FLEET)) as wire:
        bound = [bind_router(wire, address, SERVER) for _ in range(2)]
        assert [reached for _, reached in bound] == [f"tcp://127.0.0.1:{port}" for port in (first, first + 1)]
        with pytest.raises(OSError, match="cannot listen") as refused:
            bind_router(wire, address, SERVER)
        assert isinstance(refused.value.__cause__, zmq.ZMQError)
        assert refused.value.__cause__.errno == errno.EADDRINUSE


@pytest.mark.parametrize(("wanted", "expected"), [("lo", "tcp://127.0.0.1:"), ("[::1]", "tcp://[::1]:")])
def test_an_interface_stands_for_its_address_and_ipv6_is_an_address(wanted: str, expected: str) -> None:
    with closing(Hub(Wire(FLEET))) as hub:
        assert hub.router(f"tcp://{wanted}:0", SERVER).address.startswith(expected)
