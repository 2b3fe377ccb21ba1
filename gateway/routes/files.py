"""OpenAI's /v1/files: input and output files of batches."""

from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from openai.types import FileObject
from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse, JSONResponse, Response

from gateway.auth.rights import Right
from gateway.http.errors import BadRequest, PayloadTooLarge, TooManyRequests, UnsupportedMedia
from gateway.http.guard import body_parts
from gateway.http.openapi import DELETED, LIST, UPLOAD, described
from gateway.requests.body import Body, media_type, read_field
from gateway.routes.lists import as_json, page_of
from gateway.state import gateway_of, owner_of
from gateway.storage.batches.store import FILE_LIFETIME_S

router = APIRouter()

MAX_FILE_BYTES = 200_000_000
"""OpenAI's limit."""
MAX_UPLOADING_BYTES = 10 * MAX_FILE_BYTES
"""Most bytes of all files that are being uploaded; until they are stored, they lie in the folder for temporary files."""
FORM_BYTES = 1 << 16
"""Most bytes of a form besides its file."""
MAX_NAME = 255
EXPIRES_AFTER = {name: f"expires_after[{name}]" for name in ("anchor", "seconds")}
"""The names of these fields in a form."""


class ExpiresAfter(Body):
    """How long a file is kept; with OpenAI's bounds."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=FILE_LIFETIME_S)


@router.post("/v1/files", **described(UPLOAD, FileObject, form=True, right=Right.KEY))
async def upload_file(request: Request) -> Response:
    """Stores a file."""
    gateway = gateway_of(request)
    store, size = gateway.batches.store, 0
    if media_type(request) != "multipart/form-data":
        raise UnsupportedMedia("The request body must be multipart/form-data.")

    async def counted() -> AsyncGenerator[bytes, None]:
        nonlocal size
        async for part, _ in body_parts(request, MAX_FILE_BYTES + FORM_BYTES, _too_large):
            size += len(part)
            gateway.uploading_bytes += len(part)
            if gateway.uploading_bytes > MAX_UPLOADING_BYTES:
                raise TooManyRequests("Too many files are being uploaded at once. Try again.")
            yield part

    form = None
    try:
        parser = MultiPartParser(request.headers, counted(), max_files=1, max_fields=8, max_part_size=FORM_BYTES)
        form = await parser.parse()
        for name in form:
            if name not in ("file", "purpose", *EXPIRES_AFTER.values()):
                raise BadRequest(f"Unknown parameter `{name[:64]}`.", param=name[:64], code="unknown_parameter")
        if form.get("purpose") != "batch":
            raise BadRequest("`purpose` must be `batch`.", param="purpose")
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise BadRequest("`file` must be a file.", param="file")
        if (file.size or 0) > MAX_FILE_BYTES:
            raise _too_large()
        name = (file.filename or "upload")[:MAX_NAME]
        lifetime_s = _lifetime(form)
        await store.require_room(file.size or 0)
        return as_json((await store.add_file(file.file, name, owner_of(request), lifetime_s)).model_dump())
    except MultiPartException:
        raise BadRequest("The request body is not a valid form, or has more parts than there are fields.") from None
    finally:
        gateway.uploading_bytes -= size
        if form is not None:
            await form.close()


@router.get("/v1/files", **described(gives=LIST, right=Right.KEY))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: int = Query(10_000, ge=1, le=10_000),
    order: str = "desc",
    after: str | None = None,
) -> Response:
    """All files."""
    files = await gateway_of(request).batches.store.files(owner_of(request), purpose)
    return JSONResponse(page_of(files, limit, order, after))


@router.get("/v1/files/{file_id}", **described(gives=FileObject, right=Right.KEY))
async def get_file(request: Request, file_id: str) -> Response:
    """One file's metadata."""
    return as_json((await gateway_of(request).batches.store.file(file_id, owner_of(request))).model_dump())


@router.get("/v1/files/{file_id}/content", **described(text="application/octet-stream", right=Right.KEY))
async def get_content(request: Request, file_id: str) -> Response:
    """A file's content."""
    store = gateway_of(request).batches.store
    file = await store.file(file_id, owner_of(request))
    return FileResponse(store.path(file.id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}", **described(gives=DELETED, right=Right.KEY))
async def delete_file(request: Request, file_id: str) -> Response:
    """Deletes a file."""
    await gateway_of(request).batches.store.delete_file(file_id, owner_of(request))
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def lifetime_of(after: Any, param: str) -> float:
    """Seconds that a file is kept, by the `expires_after` object in the field `param`.  Raises `BadRequest`."""
    read = read_field(ExpiresAfter, after, param)
    return FILE_LIFETIME_S if read is None else read.seconds


def _lifetime(form: Any) -> float:
    after = {name: form[field] for name, field in EXPIRES_AFTER.items() if field in form}
    seconds = str(after.get("seconds", ""))
    if seconds.isdecimal() and len(seconds) < 12:
        after["seconds"] = int(seconds)
    return lifetime_of(after or None, "expires_after")


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"The file is larger than {MAX_FILE_BYTES} bytes.", param="file")
