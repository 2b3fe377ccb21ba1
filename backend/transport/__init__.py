"""ZeroMQ sockets and shared memory of the data plane.  The only package that imports zmq."""

from backend.transport.hub import Buffer, Dealer, Hub, ServerSocket
from backend.transport.ring import RingReader, RingWriter
from backend.transport.sockets import ServerKeys, Wire, connect_dealer, new_server_keys
