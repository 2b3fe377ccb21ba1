"""Checks path, host names and origins.  Reads bodies, with bounds on their size and time."""

import asyncio
import ipaddress
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from backend.config.settings import GatewaySettings
from gateway.http.errors import BadRequest, Forbidden, PayloadTooLarge, RequestTimeout, TooManyRequests

BODY_TIMEOUT_S = 60.0
"""Seconds for a request's body to arrive.  Long enough for a bad connection; other servers allow at least as much."""
BODY_BYTES_PER_S = 1 << 14
"""Each so many bytes that have arrived prolong that time by a second.  So 16 MiB may take 18 minutes, a trickling body one."""
MAX_BODY_BYTES = 20 << 20
"""Most bytes of one body."""
MAX_ARRIVING_BYTES = 1 << 29
"""Most bytes in memory of all incomplete bodies together; uploaded files are written to disk."""
PROBES = frozenset({"/livez", "/liveness", "/readyz", "/health"})
"""Served under any host name; the answers contain no information."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:]*)(?::\d+)?")


def check_source(scope: Scope, settings: GatewaySettings, *, has_key: bool) -> None:
    """Refuses control characters in paths.

    On loopback without a key, also refuses host names and origins other than loopback ones.  Such a gateway trusts this
    machine.  But a web page could make a browser on this machine call it: under a host name of the page's own (DNS
    rebinding), or from a foreign origin without reading the answer.  Pages of `cors_origins` may call; `*` means all.
    """
    if _CONTROL.search(scope["path"]):
        raise BadRequest("The URL's path has a control character.", code="invalid_url")
    if has_key or scope["path"] in PROBES or not is_loopback(settings.host):
        return
    headers = Headers(scope=scope)
    if not is_loopback(host_of(headers.get("host", ""))):
        raise Forbidden("Without an API key this gateway answers to its own machine's names only, such as localhost.")
    origin = headers.get("origin")
    if not (is_local_origin(origin) or {origin, "*"} & {*settings.cors_origins}):
        raise Forbidden("Without an API key this gateway serves no web pages but those of `gateway.cors_origins`.")


async def body_parts(
    request: Request, most: int, too_large: Callable[[], PayloadTooLarge]
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """A body's parts as they come, each with whether more are to come.

    Raises `RequestTimeout`, `ClientDisconnect`, and `too_large()` as soon as more than `most` bytes are known to come.
    """
    declared, size, more = request.headers.get("content-length", ""), 0, True
    if declared.isdigit() and int(declared) > most:
        raise too_large()
    deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
    while more:
        try:
            async with asyncio.timeout_at(deadline):
                message: Any = await request.receive()
        except TimeoutError:
            raise RequestTimeout("The request body took too long to arrive.") from None
        if message["type"] != "http.request":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        deadline += len(part) / BODY_BYTES_PER_S
        if size > most:
            raise too_large()
        yield part, more


async def read_body(request: Request, most: int) -> None:
    """Waits for the whole body, of at most `most` bytes, and puts it into the request's state.

    Until it is there, no quota or slot is held for it.

    Raises what `body_parts` does, or `TooManyRequests`.
    """
    gateway, body = request.app.state.gateway, bytearray()

    def too_large() -> PayloadTooLarge:
        return PayloadTooLarge(f"The request body is larger than {most} bytes.")

    try:
        async for part, more in body_parts(request, most, too_large):
            body += part
            gateway.arriving_bytes += len(part)
            if more and gateway.arriving_bytes > MAX_ARRIVING_BYTES:
                raise TooManyRequests("Too many large requests arrive at once. Try again.")
    finally:
        gateway.arriving_bytes -= len(body)
    request.state.body = body


def host_of(host: str) -> str:
    """The name in a `Host` header; empty when it is malformed."""
    named = _HOST.fullmatch(host)
    return named["name"].strip("[]") if named is not None else ""


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Behind `::`, a client of IPv4 has such an address.
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_local_origin(origin: str | None) -> bool:
    """Whether no web page of another machine sent the request, going by its header `Origin`."""
    if origin is None:
        return True
    try:
        return is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return False
