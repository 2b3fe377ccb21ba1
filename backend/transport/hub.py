"""One thread's sockets and its wake-up: the basis of verifiers' and drafters' loops.

A `Hub` belongs to the thread that polls it; only `wake` may be called from another.
"""

import contextlib
import logging
import os
import time
import uuid
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from backend.transport.sockets import IPC, ServerKeys, Wire, bind_router, connect_dealer

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
"""A frame to send; it is copied before `send` returns."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LOG_EVERY_S = 60.0


class ServerSocket:
    """A bound server socket.  It counts the connections that it refused: the peer had a wrong key, no key, or no CURVE.

    libzmq reports each failed handshake to an inproc socket.  That socket is unbounded: a failed handshake costs a few bytes
    and never blocks a thread.  Therefore it must be emptied regularly (`connections_refused`).
    """

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.socket = socket
        self.address = address
        self._refused = 0
        self._logged_at = float("-inf")
        reports = f"inproc://refused-{uuid.uuid4().hex}"
        socket.monitor(reports, FAILED)
        self._reports: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.connect(reports)

    def connections_refused(self) -> int:
        """Reads the reports since the last call; returns the number of connections refused so far."""
        before = self._refused
        with contextlib.suppress(zmq.Again):
            while True:
                report = parse_monitor_message(self._reports.recv_multipart(zmq.NOBLOCK))
                self._refused += bool(report["event"] & FAILED)
        now = time.monotonic()
        if self._refused > before and now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            logger.warning("turned away a connection without this fleet's keys (%d so far)", self._refused)
        return self._refused

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
        """Closes a dealer that no hub polls; queued messages are dropped."""
        self.socket.close()


class Hub:
    """Polls any number of sockets together with a wake-up from other threads."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._bound: list[str] = []

    def router(self, address: str, keys: ServerKeys | None = None, local_address: str = "") -> ServerSocket:
        """Binds a server socket; see `bind_router`."""
        socket, bound = bind_router(self.wire, address, keys, local_address=local_address)
        self._poller.register(socket, zmq.POLLIN)
        self._bound += [bound, local_address]
        return ServerSocket(socket, bound)

    def dealer(self, address: str, server_key: str = "") -> Dealer:
        """Connects a client socket; see `connect_dealer`."""
        socket = connect_dealer(self.wire, address, server_key)
        self._poller.register(socket, zmq.POLLIN)
        return Dealer(socket)

    def drop(self, dealer: Dealer) -> None:
        self._poller.unregister(dealer.socket)
        dealer.close()

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
        """Closes all sockets and the context, and removes the files of `ipc://` sockets."""
        os.close(self._wake)
        self.wire.close()
        for address in self._bound:
            if address.startswith(IPC):
                Path(address.removeprefix(IPC)).unlink(missing_ok=True)
