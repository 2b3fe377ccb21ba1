"""A DEALER for asyncio: sends without waiting, receives by awaiting, and reports a lost connection.

Used in the gateway's event loop; not thread-safe.  `sockets.connect_dealer` makes the socket, with addresses, heartbeats and
CURVE.  The event loop watches the plain socket, because `zmq.asyncio` takes twice the time.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from backend.transport.hub import Buffer
from backend.transport.sockets import Wire, connect_dealer


class _Watched:
    """A socket that the event loop watches."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[Sequence[Buffer]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._loop.add_reader(socket.fileno(), self._look)

    async def receive(self) -> list[bytes]:
        """The next message's frames.  Yields to other tasks first: a peer may send as fast as its messages are read."""
        await asyncio.sleep(0)
        while True:
            try:
                frames: list[bytes] = self.socket.recv_multipart(zmq.NOBLOCK)
                return frames
            except zmq.Again:
                self._waiting = self._loop.create_future()
                if self._unsent:
                    self._look()  # receiving may have consumed the signal that there is room to send
                await self._waiting

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message; while the socket's queue is full, keeps it for later."""
        self._unsent.append(frames)
        self._look()

    def close(self) -> None:
        """Drops the socket and everything unsent."""
        self._loop.remove_reader(self.socket.fileno())
        self._unsent.clear()
        self.socket.close(linger=0)

    def _look(self) -> None:
        while self._unsent:
            try:
                self.socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            self._unsent.popleft()
        # The descriptor signals a change once, and sending may have consumed it.
        waiting = self._waiting
        if waiting is not None and self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN and not waiting.done():
            waiting.set_result(None)


class AsyncDealer(_Watched):
    """One connection to one ROUTER.  Needs the running event loop.

    Raises `ValueError` for a tcp address without the keys it needs.
    """

    def __init__(self, wire: Wire, address: str, server_key: str = "", high_water_mark: int = 10_000) -> None:
        super().__init__(connect_dealer(wire, address, server_key, high_water_mark))
        self._monitor = _Watched(self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues one message; never waits, so that it can be called while a task is being cancelled."""
        if not self.socket.closed:
            super().send(frames)

    async def disconnected(self) -> None:
        """Returns when an established connection has been lost.  Messages may be lost too, even if it reconnects."""
        while True:
            message = parse_monitor_message(await self._monitor.receive())
            if message["event"] == zmq.EVENT_DISCONNECTED:
                return

    def close(self) -> None:
        """Drops the connection and everything unsent."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self._monitor.close()
        super().close()
