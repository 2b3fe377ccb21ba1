"""A peer that is not read for long costs memory, never the process.

libzmq (4.3.5) ends the process (`Assertion failed: _input_stopped`) when a connection whose inbox was full is made anew because
heartbeats went unread, and its messages are then read.  Run in a process of its own, which would die of it.
"""

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
