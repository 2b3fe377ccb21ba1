"""OpenAI's /v1/conversations: stored items, which responses continue and add to."""

import uuid
from typing import Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from gateway.auth.rights import Right
from gateway.http.errors import NotFound
from gateway.http.openapi import CONVERSATION, DELETED, ITEM, LIST, described
from gateway.requests.body import Body, parse, read_json
from gateway.routes.lists import as_json, page_of
from gateway.state import gateway_of, owner_of
from gateway.storage.responses.turn import as_items

router = APIRouter()

MAX_ITEMS = 20
"""Most items that one call adds; OpenAI's limit."""


class Metadata(Body):
    """A conversation's metadata."""

    metadata: dict[str, str] = Field({})


class Items(Body):
    """Items to add to a conversation."""

    items: list[dict[str, Any]] = Field(max_length=MAX_ITEMS)


class NewConversation(Metadata):
    """The body of a request to create a conversation."""

    items: list[dict[str, Any]] = Field([], max_length=MAX_ITEMS)


@router.post("/v1/conversations", **described(NewConversation, CONVERSATION, right=Right.KEY))
async def create_conversation(request: Request) -> Response:
    """Creates a conversation, with its first items."""
    body = parse(NewConversation, await read_json(request), {})
    conversation_id = f"conv_{uuid.uuid4().hex}"
    store = gateway_of(request).responses.store
    items = as_items(body.items, "items")
    return JSONResponse(await store.create_conversation(conversation_id, owner_of(request), body.metadata, items))


@router.get("/v1/conversations/{conversation_id}", **described(gives=CONVERSATION, right=Right.KEY))
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """Returns a conversation's metadata."""
    return JSONResponse(await gateway_of(request).responses.store.conversation(conversation_id, owner_of(request)))


@router.post("/v1/conversations/{conversation_id}", **described(Metadata, CONVERSATION, right=Right.KEY))
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replaces a conversation's metadata."""
    body = parse(Metadata, await read_json(request), {})
    store = gateway_of(request).responses.store
    return JSONResponse(await store.update_conversation(conversation_id, owner_of(request), body.metadata))


@router.delete("/v1/conversations/{conversation_id}", **described(gives=DELETED, right=Right.KEY))
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Deletes a conversation and its items."""
    await gateway_of(request).responses.store.delete_conversation(conversation_id, owner_of(request))
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get("/v1/conversations/{conversation_id}/items", **described(gives=LIST, right=Right.KEY))
async def list_items(
    request: Request, conversation_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str | None = None
) -> Response:
    """The items of a conversation."""
    items = await gateway_of(request).responses.store.items(conversation_id, owner_of(request))
    return as_json(page_of(items, limit, order, after))


@router.post("/v1/conversations/{conversation_id}/items", **described(Items, LIST, right=Right.KEY))
async def add_items(request: Request, conversation_id: str) -> Response:
    """Adds items to a conversation."""
    items = as_items(parse(Items, await read_json(request), {}).items, "items")
    await gateway_of(request).responses.store.add_items(conversation_id, owner_of(request), items)
    return as_json(page_of(items, MAX_ITEMS, "asc", None))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", **described(gives=ITEM, right=Right.KEY))
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """One item of a conversation."""
    for item in await gateway_of(request).responses.store.items(conversation_id, owner_of(request)):
        if item["id"] == item_id:
            return as_json(item)
    raise NotFound("There is no such item in this conversation.", param="item_id")


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", **described(gives=CONVERSATION, right=Right.KEY))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Deletes an item; answers with the conversation."""
    store, owner = gateway_of(request).responses.store, owner_of(request)
    await store.delete_item(conversation_id, owner, item_id)
    return JSONResponse(await store.conversation(conversation_id, owner))
