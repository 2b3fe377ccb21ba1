"""The fleet page at `/`, its files, and the events that feed it.

The page and its files are the same for everyone and say nothing of the fleet, so they need no key; the events do, like
`/fleet`.  The page asks for the key and sends it in a header, which is why it reads the events with `fetch`.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.fleet_feed import FleetStream
from gateway.state import gateway_of

router = APIRouter()

_FOLDER = files("gateway") / "page"
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = {"/" if each.name == "index.html" else f"/page/{each.name}": each for each in _FOLDER.iterdir() if each.is_file()}
"""What is served to anyone, by path."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Kept, but asked about every time: an update of the gateway shows at once.
    "cache-control": "no-cache",
}


@router.get("/fleet/events")
async def events(request: Request) -> Response:
    """The fleet about once a second, as server-sent events named `fleet`."""
    return FleetStream(gateway_of(request).feed)


def _serve(path: str, source: Traversable) -> None:
    content = source.read_bytes()
    media_type = _MEDIA_TYPES[source.name.rpartition(".")[2]]
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'

    async def file(request: Request) -> Response:
        headers = {**HEADERS, "etag": etag}
        if etag in [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    router.add_api_route(path, file, methods=["GET", "HEAD"], name=source.name)


for _path, _source in FILES.items():
    _serve(_path, _source)
