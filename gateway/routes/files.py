"""OpenAI's /v1/files: inputs and outputs of batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse, JSONResponse, Response

from gateway.batches.objects import shown
from gateway.batches.store import FILE_LIFETIME_S
from gateway.errors import BadRequest, PayloadTooLarge, UnsupportedMedia
from gateway.routes.lists import page_of
from gateway.state import gateway_of, owner_of

router = APIRouter()

MAX_FILE_BYTES = 200_000_000
"""As with OpenAI."""
FORM_BYTES = 1 << 16
"""What a form may have besides its file."""
MAX_NAME = 255
LIFETIMES_S = (3600, FILE_LIFETIME_S)
"""At least and at most, as with OpenAI."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


@router.post("/v1/files")
async def upload_file(request: Request) -> Response:
    """Keeps a file."""
    store = gateway_of(request).batches.store
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise UnsupportedMedia("The request body must be multipart/form-data.")
    parser = MultiPartParser(request.headers, _bounded(request), max_files=1, max_fields=8, max_part_size=FORM_BYTES)
    try:
        form = await parser.parse()
    except MultiPartException:
        raise BadRequest("The request body is not a valid form, or has more parts than there are fields.") from None
    try:
        for name in form:
            if name not in ("file", "purpose", _ANCHOR, _SECONDS):
                raise BadRequest(f"Unknown parameter `{name[:64]}`.", param=name[:64], code="unknown_parameter")
        if form.get("purpose") != "batch":
            raise BadRequest("`purpose` must be `batch`.", param="purpose")
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("`file` must be a file.", param="file")
        if (file.size or 0) > MAX_FILE_BYTES:
            raise _too_large()
        name = (file.filename or "upload")[:MAX_NAME]
        return JSONResponse(shown(await store.add_file(file.file, name, owner_of(request), _lifetime(form))))
    finally:
        await form.close()


@router.get("/v1/files")
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: int = Query(10_000, ge=1, le=10_000),
    order: str = "desc",
    after: str | None = None,
) -> Response:
    """The files there are."""
    files = await gateway_of(request).batches.store.files(owner_of(request), purpose)
    return JSONResponse(page_of(files, limit, order, after))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """One of them."""
    return JSONResponse(shown(await gateway_of(request).batches.store.file(file_id, owner_of(request))))


@router.get("/v1/files/{file_id}/content")
async def get_content(request: Request, file_id: str) -> Response:
    """What it holds."""
    store = gateway_of(request).batches.store
    file = await store.file(file_id, owner_of(request))
    return FileResponse(store.path(file.id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Forgets one."""
    await gateway_of(request).batches.store.delete_file(file_id, owner_of(request))
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def lifetime_of(after: Any, param: str) -> float:
    """Seconds that a file is kept, by an `expires_after` object.  Raises `BadRequest`."""
    if after is None:
        return FILE_LIFETIME_S
    if not isinstance(after, dict) or after.keys() != {"anchor", "seconds"} or after["anchor"] != "created_at":
        raise BadRequest(f"`{param}` must have `anchor`, which is `created_at`, and `seconds`.", param=param)
    seconds, (least, most) = after["seconds"], LIFETIMES_S
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not least <= seconds <= most:
        raise BadRequest(f"`seconds` must be a number from {least} to {most}.", param=f"{param}.seconds")
    return seconds


def _lifetime(form: Any) -> float:
    if _ANCHOR not in form and _SECONDS not in form:
        return FILE_LIFETIME_S
    text = str(form.get(_SECONDS, ""))
    seconds = int(text) if text.isdecimal() and len(text) < 12 else text
    return lifetime_of({"anchor": form.get(_ANCHOR), "seconds": seconds}, "expires_after")


async def _bounded(request: Request) -> AsyncGenerator[bytes, None]:
    """The body.  Raises `PayloadTooLarge`."""
    most, size = MAX_FILE_BYTES + FORM_BYTES, 0
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large()
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large()
        yield chunk


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"The file is larger than {MAX_FILE_BYTES} bytes.", param="file")
