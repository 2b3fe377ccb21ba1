"""Health checks of the images: `healthy.py gateway PATH` or `healthy.py tcp PORT`.  Exit status 0: healthy.

Address, socket and TLS of the gateway are those that the container's variables and YAML file give.
"""

import socket
import sys

import httpx

from backend.config import sources
from gateway.cli.preflight import here, url_of

TIMEOUT_S = 5


def main(kind: str, at: str) -> int:
    try:
        if kind == "gateway":
            settings = sources.load([]).settings.gateway
            url = "http://localhost" if settings.uds else here(url_of(settings))
            # A certificate names other hosts than this one.
            with httpx.Client(transport=httpx.HTTPTransport(verify=False, uds=settings.uds), timeout=TIMEOUT_S) as http:
                http.get(url + at).raise_for_status()
        else:
            # Ray listens on the container's own address, which may differ from the loopback address.
            socket.create_connection((socket.gethostbyname(socket.gethostname()), int(at)), timeout=TIMEOUT_S).close()
    except (OSError, httpx.HTTPError, sources.ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
