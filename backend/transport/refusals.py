"""Counts the connections that a server socket refused: the peer had a wrong key, no key, or no CURVE.

Used by the thread of the server socket.  libzmq reports each failed handshake to an inproc socket.  That socket is unbounded:
a failed handshake costs a few bytes and never blocks a thread.  Therefore it must be emptied regularly (`take`).
"""

import logging
import time
import uuid

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
LOG_EVERY_S = 60.0


class Refusals:
    """Watches one server socket."""

    def __init__(self, server: zmq.Socket[bytes]) -> None:
        self._count = 0
        self._server = server
        self._logged_at = float("-inf")
        address = f"inproc://refusals-{uuid.uuid4().hex}"
        server.monitor(address, FAILED)
        self._reports: zmq.Socket[bytes] = server.context.socket(zmq.PAIR)
        self._reports.setsockopt(zmq.LINGER, 0)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.connect(address)

    def take(self) -> int:
        """Reads the reports since the last call; returns the number of connections refused so far."""
        before = self._count
        while True:
            try:
                frames = self._reports.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._count += bool(parse_monitor_message(frames)["event"] & FAILED)
        now = time.monotonic()
        if self._count > before and now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            logger.warning("turned away a connection without this fleet's keys (%d so far)", self._count)
        return self._count

    def close(self) -> None:
        """Stops watching; must be called before the server socket is closed."""
        self._server.disable_monitor()
        self._reports.close()
