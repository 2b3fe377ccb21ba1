"""The files of the fleet page (`/`) and of the API's page (`/docs`), as they are served.  Read once, at import."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


_PAGES = {"index.html": "/", "docs.html": "/docs"}


class PageFile(NamedTuple):
    media_type: str
    content: bytes
    etag: str


def _read() -> dict[str, PageFile]:
    found = {}
    for each in files(__name__).iterdir():
        media_type = _MEDIA_TYPES.get(each.name.rpartition(".")[2])
        if media_type is not None:
            content = each.read_bytes()
            path = _PAGES.get(each.name, f"/page/{each.name}")
            found[path] = PageFile(media_type, content, f'"{hashlib.sha256(content).hexdigest()[:20]}"')
    return found


FILES = _read()
"""By URL path.  They are equal for all clients and contain nothing about the fleet, so they need no key."""
