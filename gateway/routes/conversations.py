"""OpenAI's /v1/conversations: items that responses are made from and added to."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response

from gateway.errors import BadRequest, NotFound
from gateway.requests import read_json
from gateway.responses.turn import as_items
from gateway.routes.lists import page_of
from gateway.state import gateway_of, owner_of

router = APIRouter()

MAX_ITEMS = 20
"""Items added in one call, as with OpenAI."""


@router.post("/v1/conversations")
async def create_conversation(request: Request) -> Response:
    """A new one, with its first items."""
    data = await _fields(request, {"items", "metadata"})
    conversation_id = f"conv_{uuid.uuid4().hex}"
    store = gateway_of(request).responses.store
    return JSONResponse(
        await store.create_conversation(conversation_id, owner_of(request), _metadata(data), _items(data.get("items") or []))
    )


@router.get("/v1/conversations/{conversation_id}")
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """Its metadata."""
    return JSONResponse(await gateway_of(request).responses.store.conversation(conversation_id, owner_of(request)))


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Other metadata."""
    data = await _fields(request, {"metadata"})
    store = gateway_of(request).responses.store
    return JSONResponse(await store.update_conversation(conversation_id, owner_of(request), _metadata(data)))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Forgets it and its items."""
    await gateway_of(request).responses.store.delete_conversation(conversation_id, owner_of(request))
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(
    request: Request, conversation_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str | None = None
) -> Response:
    """Its items."""
    items = await gateway_of(request).responses.store.items(conversation_id, owner_of(request))
    return JSONResponse(page_of(items, limit, order, after))


@router.post("/v1/conversations/{conversation_id}/items")
async def add_items(request: Request, conversation_id: str) -> Response:
    """Further items."""
    items = _items((await _fields(request, {"items"})).get("items"))
    await gateway_of(request).responses.store.add_items(conversation_id, owner_of(request), items)
    return JSONResponse(page_of(items, MAX_ITEMS, "asc", None))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """One of them."""
    for item in await gateway_of(request).responses.store.items(conversation_id, owner_of(request)):
        if item["id"] == item_id:
            return JSONResponse(item)
    raise NotFound("There is no such item in this conversation.", param="item_id")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Forgets one of them; answers with the conversation."""
    store, owner = gateway_of(request).responses.store, owner_of(request)
    await store.delete_item(conversation_id, owner, item_id)
    return JSONResponse(await store.conversation(conversation_id, owner))


async def _fields(request: Request, known: set[str]) -> dict[str, Any]:
    data = await read_json(request, gateway_of(request).max_body_bytes)
    for name in data.keys() - known:
        raise BadRequest(f"Unknown parameter `{name[:64]}`.", param=name[:64], code="unknown_parameter")
    return data


def _metadata(data: dict[str, Any]) -> dict[str, Any]:
    metadata = data.get("metadata") or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadRequest("`metadata` must be an object of strings.", param="metadata")
    return metadata


def _items(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise BadRequest(f"`items` must be a list of {MAX_ITEMS} items at most.", param="items")
    return as_items(value)
