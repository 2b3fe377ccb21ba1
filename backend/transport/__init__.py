"""ZeroMQ sockets of the data plane.  The only package that imports zmq."""

from backend.transport.hub import Dealer, Hub, Router
from backend.transport.sockets import (
    ServerKeys,
    Wire,
    bind_router,
    connect_dealer,
    new_server_keys,
    unlink_ipc_on_exit,
)

__all__ = [
    "Dealer",
    "Hub",
    "Router",
    "ServerKeys",
    "Wire",
    "bind_router",
    "connect_dealer",
    "new_server_keys",
    "unlink_ipc_on_exit",
]
