"""Checks the port, keys, certificates and where state is kept, before anything heavy starts; makes the listening socket."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from backend.config import environment
from backend.config.sources import ConfigError

if TYPE_CHECKING:
    from backend.config import Settings
    from backend.config.settings import GatewaySettings


def check_gateway(settings: Settings) -> None:
    """Makes all checks now, not only after the models are loaded.  Raises `ConfigError`."""
    check_files(settings)
    host, port = settings.gateway.host, settings.gateway.port
    try:
        listen(host, port).close()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error} (--port 0 takes a free one)") from error


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens; `shared`: with those of other processes on this port.  Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that name their protocol.  Without TCP_NODELAY every token waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            # Each process has an accept queue of its own, and Linux spreads connections over them by a hash.  With one common
            # queue, the process that wakes first would get most connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(settings: GatewaySettings) -> str:
    """The URL of a gateway with these settings."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{settings.port}"


def here(url: str) -> str:
    """The URL at which this machine reaches a gateway that listens at `url`, perhaps on all its addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def check_keys(own: GatewaySettings, theirs: GatewaySettings) -> None:
    """Refuses a further gateway that would need fewer keys than the fleet was started with.  Raises `ConfigError`."""
    for names in (("api_key", "keys_file"), ("admin_key", "keys_file")):
        named = [name for name in names if getattr(theirs, name)]
        if named and not any(getattr(own, name) for name in names):
            raise ConfigError(f"the fleet is served with gateway.{named[0]}: set {' or '.join(names)} for this gateway too")


def check_files(settings: Settings) -> None:
    """Checks the keys file, the certificate, and where state and quotas are kept.  Raises `ConfigError`."""
    from gateway.auth.key_ring import KeyFileError, read_entries
    from gateway.storage.sqlite import Database

    section = settings.gateway
    try:
        read_entries(section.keys_file)
        if section.tls_cert:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(section.tls_cert, section.tls_key)
        elif section.tls_key:
            raise ConfigError("gateway.tls_key needs gateway.tls_cert")
    except KeyFileError as error:
        raise ConfigError(f"gateway.keys_file: {error}") from None
    except OSError as error:
        # ssl.SSLError, for a wrong certificate, is an OSError too.
        raise ConfigError(f"gateway.tls_cert, tls_key: {error.strerror or error}") from None
    try:
        if (folder := state_folder(settings)) is not None:
            Database(folder / "quotas.sqlite").close()
    except OSError as error:
        raise ConfigError(f"gateway.state_dir: {error}") from None


def state_folder(settings: Settings) -> Path | None:
    """Where responses, batches and shared quotas are kept; None: nowhere."""
    folder = settings.gateway.state_dir
    if folder == "none":
        return None
    return environment.state_dir() if folder == "auto" else Path(folder).expanduser()
