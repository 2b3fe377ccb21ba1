"""The fleet page at `/`, the API's page at `/docs`, and their files.

They are equal for all clients and contain nothing about the fleet, so they need no key.  The fleet page reads `/fleet`, which
needs one.  The page asks its user for the key and sends it in a header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "page"
FILES = [each for each in FOLDER.iterdir() if each.suffix in {".css", ".html", ".js", ".svg"}]
PAGES = frozenset({"/", "/docs", *(f"/page/{each.name}" for each in FILES if each.suffix != ".html")})
"""The paths that are served."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Browsers keep the files, but check each time whether they have changed, so that an update of the gateway shows at once.
    "cache-control": "no-cache",
}


class _Files(StaticFiles):
    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(HEADERS)
        return response


_STATIC = _Files(directory=FOLDER)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def fleet_page(request: Request) -> Response:
    return await _STATIC.get_response("index.html", request.scope)


@router.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
async def docs_page(request: Request) -> Response:
    return await _STATIC.get_response("docs.html", request.scope)


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    if f"/page/{name}" not in PAGES:
        raise HTTPException(404)
    return await _STATIC.get_response(name, request.scope)
