"""OpenAI's /v1/batches: requests from a file, answered within a day."""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from gateway.auth.rights import Right
from gateway.http.errors import BadRequest, Conflict
from gateway.http.openapi import LIST, described
from gateway.requests.body import Body, parse, read_json
from gateway.routes.files import ExpiresAfter, lifetime_of
from gateway.routes.lists import as_json, page_of
from gateway.state import gateway_of, owner_of
from gateway.storage.batches.calls import ENDPOINTS
from gateway.storage.batches.lines import new_id
from gateway.storage.batches.objects import Batch
from gateway.storage.batches.store import WINDOW_S

router = APIRouter()


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class NewBatch(Body):
    """The body of a request to create a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[_Key, _Value] | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None


@router.post("/v1/batches", **described(NewBatch, Batch, right=Right.KEY))
async def create_batch(request: Request) -> Response:
    """Creates a batch, which is carried out as the fleet has time."""
    gateway = gateway_of(request)
    batches, store = gateway.batches, gateway.batches.store
    data = await read_json(request)
    lifetime_s = lifetime_of(data.get("output_expires_after"), "output_expires_after")
    body = parse(NewBatch, data, {})
    if body.endpoint not in ENDPOINTS:
        raise BadRequest(f"`endpoint` must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=body.metadata,
        owner=owner_of(request),
        lifetime_s=lifetime_s,
    )
    await store.add_batch(batch, batches.model)
    batches.tell()
    return as_json(batch.model_dump())


@router.get("/v1/batches", **described(gives=LIST, right=Right.KEY))
async def list_batches(request: Request, limit: int = Query(20, ge=1, le=100), after: str | None = None) -> Response:
    """All batches, the latest first."""
    batches = await gateway_of(request).batches.store.batches(owner_of(request))
    return JSONResponse(page_of(batches, limit, "desc", after))


@router.get("/v1/batches/{batch_id}", **described(gives=Batch, right=Right.KEY))
async def get_batch(request: Request, batch_id: str) -> Response:
    """One batch, with its progress."""
    return as_json((await gateway_of(request).batches.store.batch(batch_id, owner_of(request))).model_dump())


@router.post("/v1/batches/{batch_id}/cancel", **described(gives=Batch, right=Right.KEY))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch; answers so far are kept."""
    batches = gateway_of(request).batches

    def change(batch: Batch) -> Batch:
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise Conflict(f"The batch is {batch.status} and cannot be cancelled.")
        return batch.entering("cancelling")

    batch = await batches.store.change(batch_id, owner_of(request), change)
    batches.tell()
    return as_json(batch.model_dump())
