"""Health checks of the images: `healthy.py http PORT PATH` or `healthy.py tcp PORT`.  Exit status 0: healthy.

The images have no curl, so the checks use Python's standard library.
"""

import socket
import sys
import urllib.request

TIMEOUT_S = 5


def main(kind: str, port: str, *path: str) -> int:
    try:
        if kind == "http":
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path[0]}", timeout=TIMEOUT_S).close()
        else:
            # Ray listens on the container's own address, which may differ from the loopback address.
            socket.create_connection((socket.gethostbyname(socket.gethostname()), int(port)), timeout=TIMEOUT_S).close()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
