"""The fleet page at `/` and its files.

They are equal for all clients and contain nothing about the fleet, so they need no key.  The page reads `/fleet`, which needs
one: it asks its user for the key and sends it in a header.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from gateway.http.openapi import UNDESCRIBED

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "page"
_STATIC = StaticFiles(directory=FOLDER)
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Browsers keep the files, but check each time whether they have changed, so that an update of the gateway shows at once.
    "cache-control": "no-cache",
}


@router.api_route("/", methods=["GET", "HEAD"], **UNDESCRIBED)
@router.api_route("/page/{name}", methods=["GET", "HEAD"], **UNDESCRIBED)
async def page(request: Request) -> Response:
    """The page, or one of its files."""
    response = await _STATIC.get_response(request.path_params.get("name", "index.html"), request.scope)
    response.headers.update(HEADERS)
    return response
