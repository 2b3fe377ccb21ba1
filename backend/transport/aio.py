"""A DEALER for asyncio: sends without waiting, receives by awaiting, and knows when its peer has gone.

Lives in the event loop of the process that made it (the gateway's); not thread-safe.  Built on `sockets.connect_dealer`, so
addresses, heartbeats and CURVE are as there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from backend.transport.sockets import Wire, connect_dealer

Buffer = bytes | bytearray | memoryview


class AsyncDealer:
    """One connection to one ROUTER.

    Raises `ValueError` for a tcp address without the keys it needs.
    """

    def __init__(self, wire: Wire, address: str, identity: bytes, server_key: str = "", high_water_mark: int = 10_000) -> None:
        # A shadow of the process's context, so that the sockets are asyncio's from birth and have one owner each: wrapping a
        # plain socket leaves two objects that both believe to own it, and the one collected later closes whatever socket
        # has been given its place in memory.
        shadow: Any = zmq.asyncio.Context(wire.context)
        self._socket: Any = connect_dealer(Wire(wire.fleet_keys, shadow), address, identity, server_key, high_water_mark)
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._closed = False

    def send(self, frames: Sequence[Buffer]) -> None:
        """Queues one message; never waits, so that it can be called while a task is being cancelled."""
        if not self._closed:
            future: asyncio.Future[Any] = self._socket.send_multipart(frames)
            future.add_done_callback(_retrieve)

    async def receive(self) -> list[memoryview]:
        """The next message's frames, uncopied."""
        frames = await self._socket.recv_multipart(copy=False)
        return [frame.buffer for frame in frames]

    async def disconnected(self) -> None:
        """Returns when an established connection has been lost: messages may be gone, whatever comes next."""
        while True:
            message = parse_monitor_message(await self._monitor.recv_multipart())
            if message["event"] == zmq.EVENT_DISCONNECTED:
                return

    def close(self) -> None:
        """Drops the connection and everything unsent."""
        if self._closed:
            return
        self._closed = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
