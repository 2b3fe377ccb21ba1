"""OpenAI's /v1/batches: requests from a file, answered within a day."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Query, Request
from msgspec.structs import replace
from starlette.responses import JSONResponse, Response

from gateway.batches.objects import Batch, new_id, shown
from gateway.batches.store import WINDOW_S
from gateway.errors import BadRequest, Conflict
from gateway.requests import read_json
from gateway.routes.files import lifetime_of
from gateway.routes.lists import page_of
from gateway.state import gateway_of, owner_of

router = APIRouter()

FIELDS = frozenset({"completion_window", "endpoint", "input_file_id", "metadata", "output_expires_after"})
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
"""Of metadata: entries, and characters of each."""


@router.post("/v1/batches")
async def create_batch(request: Request) -> Response:
    """A new one, which is carried out as the fleet has time."""
    gateway = gateway_of(request)
    batches, store = gateway.batches, gateway.batches.store
    data = await read_json(request, gateway.max_body_bytes)
    for name in data.keys() - FIELDS:
        raise BadRequest(f"Unknown parameter `{name[:64]}`.", param=name[:64], code="unknown_parameter")
    for name in ("input_file_id", "endpoint", "completion_window"):
        if not isinstance(data.get(name), str):
            raise BadRequest(f"`{name}` must be a string.", param=name)
    if data["endpoint"] not in batches.endpoints:
        raise BadRequest(f"`endpoint` must be one of {', '.join(batches.endpoints)}.", param="endpoint")
    if data["completion_window"] != "24h":
        raise BadRequest("`completion_window` must be `24h`.", param="completion_window")
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint=data["endpoint"],
        input_file_id=data["input_file_id"],
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=_metadata(data.get("metadata")),
    )
    lifetime_s = lifetime_of(data.get("output_expires_after"), "output_expires_after")
    await store.add_batch(batch, owner_of(request), batches.model, lifetime_s)
    batches.tell()
    return JSONResponse(shown(batch))


@router.get("/v1/batches")
async def list_batches(request: Request, limit: int = Query(20, ge=1, le=100), after: str | None = None) -> Response:
    """The batches there are, the latest first."""
    batches = await gateway_of(request).batches.store.batches(owner_of(request))
    return JSONResponse(page_of(batches, limit, "desc", after))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """How far one is."""
    return JSONResponse(shown((await gateway_of(request).batches.store.batch(batch_id, owner_of(request))).batch))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Ends one; what is answered stays."""
    batches = gateway_of(request).batches

    def change(batch: Batch) -> Batch:
        if batch.status == "cancelling":
            return batch
        if batch.status not in ("validating", "in_progress"):
            raise Conflict(f"The batch is {batch.status} and cannot be cancelled.")
        return replace(batch, status="cancelling", cancelling_at=int(time.time()))

    batch = await batches.store.change(batch_id, owner_of(request), change)
    batches.tell()
    return JSONResponse(shown(batch))


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadRequest("`metadata` must be an object of strings.", param="metadata")
    if len(value) > MAX_PAIRS or any(len(key) > MAX_KEY or len(each) > MAX_VALUE for key, each in value.items()):
        most = f"{MAX_PAIRS} entries, {MAX_KEY} characters in a key and {MAX_VALUE} in a value"
        raise BadRequest(f"`metadata` may have {most} at most.", param="metadata")
    return value
