"""Counts the connections that a server socket turned away: another key than the fleet's, none, or no CURVE at all.

Belongs to the thread of the server socket.  libzmq reports each failed handshake to an inproc socket, which must be
emptied now and then: it is unbounded, so that whoever knocks all day costs a few bytes each time and never holds a thread up.
"""

from __future__ import annotations

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
        """Reads what was reported since the last call; returns how many connections were turned away so far."""
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
        """Before the server socket is closed."""
        self._server.disable_monitor()
        self._reports.close()
