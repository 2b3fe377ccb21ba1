"""Makes the data plane's ZeroMQ sockets.  Any process; a socket belongs to the thread that made it.

Servers (verifiers for gateways, drafters for verifiers) bind a ROUTER; clients connect a DEALER.  On one host the address is
`ipc://`, in a directory that only the user may enter.  Between hosts it is `tcp://` with CURVE: the server proves itself with a
key of its own, and accepts only the fleet's client key, which the coordinator hands out.  A server may listen at both; then
processes of its own node use ipc.
"""

import os
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import zmq
import zmq.auth.thread

from backend.fleet import Member, reached_at

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 5000
CONNECT_TIMEOUT_MS = 2000
"""Limit of one attempt to connect.  The kernel repeats a lost SYN ever more slowly; a new attempt finds a restored link."""
IPC = "ipc://"
TCP = "tcp://"
PORT_RANGE = re.compile(r"(?P<host>tcp://.+):(?P<first>\d+)-(?P<last>\d+)")


class ServerKeys(msgspec.Struct, frozen=True):
    """A CURVE key pair (Z85 text)."""

    public: str
    secret: str


def new_server_keys() -> ServerKeys:
    public, secret = zmq.curve_keypair()
    return ServerKeys(public.decode(), secret.decode())


@dataclass
class Wire:
    """One process's ZeroMQ context and fleet credentials.

    `fleet_keys` is the client key pair of the whole fleet: clients present it, and servers accept no other.  Without it only
    `ipc://` addresses are allowed.  `node_id` is the Ray node of this process, if known.
    """

    fleet_keys: ServerKeys | None = None
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    node_id: str = ""
    _authenticator: zmq.auth.thread.ThreadAuthenticator | None = None

    def allow_only_fleet(self) -> None:
        """Starts the ZAP handler, which refuses all client keys except the fleet's."""
        if self._authenticator is not None or self.fleet_keys is None:
            return
        authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
        authenticator.start()
        allowed = self.fleet_keys.public.encode()
        only_fleet = SimpleNamespace(callback=lambda domain, key: key == allowed)
        authenticator.configure_curve_callback(domain="*", credentials_provider=only_fleet)
        self._authenticator = authenticator

    def route(self, member: Member) -> str:
        """The address at which this process connects to a member: ipc on the same node, if it may write to that socket."""
        address = reached_at(member, self.node_id)
        if address != member.address and not os.access(address.removeprefix(IPC), os.W_OK):
            return member.address
        return address

    def close(self) -> None:
        """Stops the authenticator, closes all sockets and ends the context.  No other thread may use one of the sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.destroy(linger=0)


def _common(socket: zmq.Socket[bytes], address: str, high_water_mark: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, "[" in address)


def bind_router(
    wire: Wire, address: str, keys: ServerKeys | None = None, high_water_mark: int = 1000, local_address: str = ""
) -> tuple[zmq.Socket[bytes], str]:
    """Binds a ROUTER; returns it with the address at which it is reached.

    `tcp://host:0` binds any free port, `tcp://host:20000-20009` the first free port of the range.  The socket also listens at
    `local_address` (ipc).  Raises `ValueError` for a tcp address without keys, `OSError` if an address cannot be bound.
    """
    socket: zmq.Socket[bytes] = wire.context.socket(zmq.ROUTER)
    _common(socket, address, high_water_mark)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or else messages for a full queue are lost without an error
    try:
        # A listener keeps the options in force when it is bound.  So this one has no CURVE; its directory protects it.
        if local_address:
            _bind(socket, local_address)
        if address.startswith(TCP):
            if keys is None or wire.fleet_keys is None:
                raise ValueError(f"{address}: a tcp socket needs the fleet's CURVE keys")
            wire.allow_only_fleet()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_publickey = keys.public.encode()
            socket.curve_server = True
        return socket, _bind(socket, address)
    except (OSError, ValueError):
        socket.close()
        raise


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    """Listens at `address`, or at the first free port of its range; returns the address bound.  Raises `OSError`."""
    ranged = PORT_RANGE.fullmatch(address)
    ports = range(int(ranged["first"]), int(ranged["last"]) + 1) if ranged else ()
    failure: zmq.ZMQError | None = None
    for candidate in [f"{ranged['host']}:{port}" for port in ports] if ranged else [address]:
        try:
            socket.bind(candidate)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            failure = error
    raise OSError(f"cannot listen on {address}: {failure}") from failure


def connect_dealer(wire: Wire, address: str, server_key: str = "", high_water_mark: int = 1000) -> zmq.Socket[bytes]:
    """A DEALER connecting to `address`; it reconnects by itself until closed.

    It has no identity: the ROUTER names each connection.  With one, a ROUTER that has not noticed the end of a connection yet
    would ignore the next one for ever.  So after a reconnection the server takes this client for a new one.
    `high_water_mark`: messages that may wait to be sent; received messages that are not yet read are unbounded.
    Raises `ValueError` for a tcp address without the server's key or the fleet's keys.
    """
    socket: zmq.Socket[bytes] = wire.context.socket(zmq.DEALER)
    _common(socket, address, high_water_mark)
    # The inbox must be unbounded.  With a full one, libzmq stops reading the connection, misses heartbeats and reconnects; when
    # the inbox is read later, libzmq 4.3.5 ends the process (libzmq issue 3937).  Servers only send what clients asked for.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    if address.startswith(TCP):
        if not server_key or wire.fleet_keys is None:
            socket.close()
            raise ValueError(f"{address}: a tcp socket needs the fleet's CURVE keys")
        socket.curve_serverkey = server_key.encode()
        socket.curve_publickey = wire.fleet_keys.public.encode()
        socket.curve_secretkey = wire.fleet_keys.secret.encode()
    socket.connect(address)
    return socket
