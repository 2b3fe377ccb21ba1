"""One thread's sockets and its wake-up: the basis of verifiers' and drafters' loops.

A `Hub` belongs to the thread that polls it; only `wake` may be called from another.
"""

import contextlib
import os

import zmq

from backend.transport.refusals import Refusals
from backend.transport.sockets import ServerKeys, Wire, bind_router, connect_dealer

Buffer = bytes | bytearray | memoryview
"""A frame to send; it is copied before `send` returns."""


class ServerSocket:
    """A bound server socket."""

    def __init__(self, socket: zmq.Socket[bytes], address: str, refusals: Refusals | None = None) -> None:
        self.socket = socket
        self.address = address
        self.refusals = refusals

    def connections_refused(self) -> int:
        """Connections refused so far for lack of the fleet's keys.  Call it regularly (see `refusals.py`)."""
        return 0 if self.refusals is None else self.refusals.take()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """The next message as (sender, frames); None if none has arrived."""
        try:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return identity, frames

    def send(self, identity: bytes, *frames: Buffer) -> bool:
        """Queues one message; returns False if that peer's queue is full.  A peer that is gone is not an error."""
        try:
            self.socket.send_multipart((identity, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return True


class Dealer:
    """A client socket; it reconnects by itself until it is closed."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def receive(self) -> list[bytes] | None:
        """The next message's frames; None if none has arrived."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, *frames: Buffer) -> bool:
        """Queues one message; returns False if the queue is full."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Closes a dealer that no hub owns; queued messages are dropped."""
        self.socket.close()


class Hub:
    """Polls any number of sockets together with a wake-up from other threads."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._refusals: list[Refusals] = []

    def router(self, address: str, keys: ServerKeys | None = None, local_address: str = "") -> ServerSocket:
        """Binds a server socket; see `bind_router`."""
        socket, bound = bind_router(self.wire, address, keys, local_address=local_address)
        self._add(socket)
        if keys is None:
            return ServerSocket(socket, bound)
        refusals = Refusals(socket)
        self._refusals.append(refusals)
        return ServerSocket(socket, bound, refusals)

    def dealer(self, address: str, server_key: str = "") -> Dealer:
        """Connects a client socket; see `connect_dealer`."""
        socket = connect_dealer(self.wire, address, server_key)
        self._add(socket)
        return Dealer(socket)

    def drop(self, dealer: Dealer) -> None:
        self._poller.unregister(dealer.socket)
        self._sockets.remove(dealer.socket)
        dealer.socket.close()

    def poll(self, timeout_s: float) -> bool:
        """Waits until a socket is readable or `wake` was called; returns False after `timeout_s` seconds."""
        events = self._poller.poll(max(0, round(timeout_s * 1000 + 0.499)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return bool(events)

    def wake(self) -> None:
        """Ends the current `poll`, or else the next one.  Any thread."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes all sockets and the context."""
        for refusals in self._refusals:
            refusals.close()
        self._refusals.clear()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        os.close(self._wake)
        self.wire.close()

    def _add(self, socket: zmq.Socket[bytes]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._sockets.append(socket)
