"""The fleet page at `/` and its files.

They are equal for all clients and contain nothing about the fleet, so they need no key.  The page reads `/fleet`, which needs
one: it asks its user for the key and sends it in a header.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from gateway.http.openapi import UNDESCRIBED

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "page"
PAGES = {
    "/": "index.html",
    **{f"/page/{each.name}": each.name for each in FOLDER.iterdir() if each.suffix in {".css", ".js", ".svg"}},
}
"""The paths that are served, and their files."""

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


def _serve(path: str, name: str) -> None:
    async def page(request: Request) -> Response:
        return await _STATIC.get_response(name, request.scope)

    router.add_api_route(path, page, methods=["GET", "HEAD"], **UNDESCRIBED)


for _path, _name in PAGES.items():
    _serve(_path, _name)
