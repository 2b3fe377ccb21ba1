"""A peer that is not read for long costs memory, never the process.

libzmq (4.3.5) ends the process (`Assertion failed: _input_stopped`) when a connection whose inbox was full is made anew because
heartbeats went unread, and its messages are then read.  Run in a process of its own, which would die of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
import zmq
from backend.transport import sockets

sockets.HEARTBEAT_MS, sockets.HEARTBEAT_TIMEOUT_MS = 20, 60
wire = sockets.Wire()
router, address = sockets.bind_router(wire, "ipc://" + sys.argv[1], high_water_mark=0)
dealer = sockets.connect_dealer(wire, address, high_water_mark=8)
dealer.send(b"here")
identity = router.recv_multipart()[0]
read = 0
for _ in range(10):
    for _ in range(200):
        router.send_multipart((identity, bytes(64)))
    time.sleep(0.2)  # so that heartbeats go unread, and the connection is made anew
    try:
        while True:
            dealer.recv(zmq.NOBLOCK)
            read += 1
            if read % 50 == 0:
                time.sleep(0.005)
    except zmq.Again:
        pass
print(read)
dealer.close()
router.close()
wire.close()
"""


def test_messages_that_are_not_read_for_longer_than_the_heartbeats_last_end_no_process(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "s")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0


DROPS = """
import sys
import zmq
from backend.transport import Hub, Wire
from backend.transport.sockets import bind_router

theirs, hub = Wire(), Hub(Wire())
stays, address = bind_router(theirs, "ipc://" + sys.argv[1])
kept = hub.dealer(address, watched=True)
for number in range(300):
    peer, address = bind_router(theirs, f"ipc://{sys.argv[1]}-{number}")
    dropped = hub.dealer(address, watched=True)
    dropped.send(b"here")
    peer.recv_multipart()
    peer.close(0)
    hub.drop(dropped)
    kept.send(b"here")
    assert stays.poll(60_000), f"nothing arrives any more after {number} peers"
    stays.recv_multipart()
stays.close(0)
hub.close()
theirs.close()
"""


def test_a_peer_that_ends_while_it_is_dropped_stops_no_other_connection(tmp_path: Path) -> None:
    """The end of a connection is reported to its monitor.  Without a reader, that would block libzmq's only I/O thread."""
    ended = subprocess.run([sys.executable, "-c", DROPS, str(tmp_path / "s")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
