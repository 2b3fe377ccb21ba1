"""`outrider reload`: has a running gateway read its keys, limits and routing again.  The command line's process."""

import re
import ssl
from pathlib import Path

import httpx

from backend.config.settings import GatewaySettings
from backend.config.sources import CommandError

TIMEOUT_S = 30.0


def reload(url: str, settings: GatewaySettings) -> list[str]:
    """Has the gateway at `url` reload, and returns its answer as lines of text.  Raises `CommandError`."""
    key = settings.admin_key or settings.api_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        verify = pinned_context(settings.tls_cert) if url.startswith("https:") and settings.tls_cert else True
        with httpx.Client(transport=httpx.HTTPTransport(verify=verify), timeout=TIMEOUT_S) as http:
            response = http.post(f"{url}/admin/reload", json={}, headers=headers)
            status, body = response.status_code, response.json()
    except (OSError, httpx.HTTPError, ValueError) as error:
        raise CommandError(f"{url}: {str(error) or type(error).__name__}") from None
    try:
        if status != 200:
            raise CommandError(body["error"]["message"])
        lines = [f"{body['keys']} keys; changed: {', '.join(body['changed']) or 'nothing else'}"]
        if body["needs_restart"]:
            lines.append(f"these need a restart: {', '.join(body['needs_restart'])}")
    except (LookupError, TypeError):
        raise CommandError(f"{url}: no gateway of Outrider answers there (status {status})") from None
    return lines


def pinned_context(file: str) -> ssl.SSLContext:
    """Trusts the gateway that has the first certificate of `file`, under any name and from any issuer, and no other.

    Raises `OSError` or `ValueError`.
    """
    found = re.search(
        r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", Path(file).read_text("ascii", "replace"), re.DOTALL
    )
    if found is None:
        raise ValueError(f"{file} has no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=found[0])
    return context
