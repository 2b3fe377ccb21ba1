"""`outrider reload`: has a running gateway read its keys, limits and routing again.  The command line's process."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from urllib.parse import urlsplit

from backend.config.settings import GatewaySettings

TIMEOUT_S = 30.0


class ReloadFailed(Exception):
    """The message is one line."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def reload(url: str, settings: GatewaySettings) -> list[str]:
    """Asks the gateway at `url`; returns what it says, by lines.  Raises `ReloadFailed`."""
    key = settings.admin_key or settings.api_key
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        connection = _connect(url, settings)
        connection.request("POST", "/admin/reload", "{}", headers)
        response = connection.getresponse()
        status, body = response.status, json.loads(response.read())
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ReloadFailed(f"{url}: {getattr(error, 'strerror', None) or type(error).__name__}") from None
    if status != 200:
        raise ReloadFailed(body["error"]["message"])
    lines = [f"{body['keys']} keys; changed: {', '.join(body['changed']) or 'nothing else'}"]
    if body["needs_restart"]:
        lines.append(f"these need a restart: {', '.join(body['needs_restart'])}")
    return lines


def url_of(settings: GatewaySettings) -> str:
    """Where a gateway with these settings listens."""
    if settings.uds:
        return f"unix:{settings.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _connect(url: str, settings: GatewaySettings) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"))
    parts = urlsplit(url)
    if parts.scheme == "https":
        # It may be signed by nobody else.
        context = ssl.create_default_context(cafile=settings.tls_cert)
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
