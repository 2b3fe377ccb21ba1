"""POST /admin/reload: keys, limits and routing are read again (`gateway.reload`)."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from gateway.errors import BadRequest, NotSupported
from gateway.reload import ReloadError, reload_all
from gateway.state import gateway_of

router = APIRouter()


@router.post("/admin/reload")
async def reload(request: Request) -> Response:
    """200: what was read is in force; 400: it is wrong, and everything stays as it was."""
    gateway = gateway_of(request)
    if gateway.reloader is None:
        raise NotSupported("This gateway was started without settings that could be read again.")
    try:
        return JSONResponse(asdict(await reload_all(gateway)))
    except ReloadError as error:
        raise BadRequest(f"Nothing has changed: {error}.", code="invalid_settings") from None
