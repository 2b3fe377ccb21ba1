"""Health checks of the images: `healthy.py gateway PATH` or `healthy.py tcp PORT`.  Exit status 0: healthy.

Address and TLS of the gateway are those that the container's variables and YAML file give.
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
            url = here(url_of(sources.load([]).settings.gateway))
            # A certificate names other hosts than this one.  Proxies that variables name are for other hosts, too.
            httpx.get(url + at, verify=False, trust_env=False, timeout=TIMEOUT_S).raise_for_status()
        else:
            # Ray listens on the container's own address, which may differ from the loopback address.
            socket.create_connection((socket.gethostbyname(socket.gethostname()), int(at)), timeout=TIMEOUT_S).close()
    except (OSError, httpx.HTTPError, sources.ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
