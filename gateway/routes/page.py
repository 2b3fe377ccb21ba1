"""The fleet page at `/`, its files, and the events that feed it; the API's page at `/docs`.

The pages and their files are equal for all clients and contain nothing about the fleet, so they need no key.  The events need
one, as `/fleet` does.  The page asks its user for the key and sends it in a header, so it reads the events with `fetch`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from gateway.errors import NotFound
from gateway.fleet_feed import FleetStream
from gateway.page import FILES
from gateway.state import gateway_of

router = APIRouter()

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Browsers keep the files, but check each time whether they have changed, so that an update of the gateway shows at once.
    "cache-control": "no-cache",
}


@router.get("/fleet/events")
async def events(request: Request) -> Response:
    """The state of the fleet about once a second, as server-sent events named `fleet`."""
    return FleetStream(gateway_of(request).feed)


async def _serve(request: Request) -> Response:
    # The router also takes a path that ends in a line break.
    file = FILES.get(request.scope["path"])
    if file is None:
        raise NotFound("there is no such page")
    headers = {**HEADERS, "etag": file.etag}
    if file.etag in [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


for _path in FILES:
    router.add_api_route(_path, _serve, methods=["GET", "HEAD"], include_in_schema=False)
