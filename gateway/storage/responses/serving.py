"""Creates responses, at once or in the background: looks up earlier items, has vLLM answer, and stores the result."""

import asyncio
import json
import logging
import sqlite3
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

from backend.engine.front import ResponseRequest
from gateway.admission.claim import Claim
from gateway.http.errors import BadRequest, RateLimited, translate
from gateway.requests.body import parse
from gateway.requests.fields import RESPONDING, drop_nulls
from gateway.requests.limits import check_items
from gateway.requests.tools import callable_tools, named_tools, only_allowed
from gateway.storage.responses.events import Event, complete, failed
from gateway.storage.responses.store import UNFINISHED, Item, ResponseStore, Row, StoredResponse
from gateway.storage.responses.turn import Turn, as_items

logger = logging.getLogger(__name__)

BACKGROUND_AT_ONCE = 16
"""Most background responses at a time; further ones are `queued`."""
BACKGROUND_QUEUED = 1000
"""Most background responses in all.  One owner may have as many as there are free places, so that some stay free for others."""
FLUSH_S = 0.2
"""Seconds between two writes of a background response's events to the store, and between two looks of those that follow it."""
TROUBLE_S = 10.0
"""Seconds between two attempts to store that a background response has failed."""
LAST = ("response.completed", "response.incomplete", "response.failed")
"""Events that end a response."""


class ResponseService:
    """`store` is None where nothing is kept: then there is no history and no background.  `context`: the model's, in tokens."""

    def __init__(self, store: ResponseStore | None, context: int) -> None:
        self._store = store
        self._context = context
        self._making: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Owners and tasks of background responses, by their ids."""
        self._turns = asyncio.Semaphore(BACKGROUND_AT_ONCE)

    @property
    def store(self) -> ResponseStore:
        """The store.  Raises `BadRequest` where there is none."""
        if self._store is None:
            raise BadRequest("This server keeps no responses (`gateway.state_dir` is `none`).", code="not_stored")
        return self._store

    async def close(self) -> None:
        """Ends background responses, which then have failed."""
        tasks = [task for _, task in self._making.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    async def turn(self, data: dict[str, Any], owner: str) -> Turn:
        """The request in `data`, with all earlier items of its conversation.  Raises `ApiError`."""
        previous, conversation = _text(data, "previous_response_id"), _conversation_id(data)
        if previous and conversation:
            raise BadRequest("Give `previous_response_id` or `conversation`, not both.", param="conversation")
        for name in ("background", "store", "stream"):
            if not isinstance(data.get(name), bool | None):
                raise BadRequest(f"`{name}` must be true or false.", param=name)
        background = data.get("background") is True
        stored = data.get("store") is not False and self._store is not None
        if background and not stored:
            raise BadRequest("`background` needs a response that is stored.", param="background")
        own = as_items(data.get("input"))
        if self._store is not None or any(item.get("type") == "item_reference" for item in own):
            own = await self.store.resolve(own, owner)
        history: list[Item] = []
        if previous is not None:
            history = await self.store.history(previous, owner)
        elif conversation is not None:
            history = await self.store.items(conversation, owner)
        if not history and not own:
            raise BadRequest("`input` must not be empty.", param="input")
        data = callable_tools(data)
        ours = ("conversation", "input", "previous_response_id")
        theirs = {name: value for name, value in only_allowed(data).items() if name not in ours}
        items = [*history, *own]
        # What vLLM made has nulls.
        drop_nulls(items)
        check_items(items, self._context, history=bool(history))
        # vLLM neither stores a response nor makes one in the background: this gateway does.
        fixed = {"input": items, "store": False, "background": False, "stream": background or data.get("stream")}
        request = parse(ResponseRequest, {**theirs, **fixed, "request_id": f"resp_{uuid.uuid4().hex}"}, RESPONDING)
        echo = request.model_dump(mode="json", by_alias=True, exclude={"input"}) | named_tools(data)
        return Turn(request, echo, owner, own, stored, background, data.get("stream") is True, previous, conversation)

    async def stream(self, turn: Turn, made: AsyncGenerator[Any, None]) -> AsyncGenerator[Event, None]:
        """Makes the response's events from vLLM's.  The response is stored before its last event."""
        async for each in complete(made, turn.shown):
            if each["type"] in LAST:
                await self.keep(turn, each["response"])
            yield each

    async def keep(self, turn: Turn, body: dict[str, Any], events: Callable[[], list[Row]] = list) -> dict[str, Any]:
        """Stores a response that has ended, in one transaction with its last `events`.  Returns its object."""
        if turn.speculation is not None:
            await turn.speculation.add_to(body)
        if turn.conversation is not None and body["status"] in ("completed", "incomplete"):
            await self.store.add_items(turn.conversation, turn.owner, [*turn.input, *body["output"]], most=None)
        if turn.background:
            await self.store.advance(turn.stored_response(body), events())
        elif turn.store:
            await self.store.put(turn.stored_response(body))
        return body

    # In the background

    async def begin(
        self, turn: Turn, made: AsyncGenerator[Any, None], model: str, created: int, claim: Claim
    ) -> dict[str, Any]:
        """Starts a background response and returns its present state.  Raises `RateLimited`."""
        own = sum(owner == turn.owner for owner, _ in self._making.values())
        most = claim.caller.concurrent_requests or BACKGROUND_QUEUED
        if own >= min(most, BACKGROUND_QUEUED - len(self._making)):
            await made.aclose()
            raise RateLimited(f"No more than {own} of your responses can be made in the background now.")
        body = turn.shown({"status": "queued", "output": [], "model": model, "created_at": created})
        task = asyncio.create_task(self._make(turn, made, body), name=turn.id)
        self._making[turn.id] = turn.owner, task
        task.add_done_callback(lambda done: self._making.pop(turn.id))
        claim.in_background = True
        task.add_done_callback(lambda done: claim.close())
        # Only now, because a burst could pass the check above while it is awaited.  The task's own writes come after it.
        await self.store.put(turn.stored_response(body))
        return body

    async def _make(self, turn: Turn, made: AsyncGenerator[Any, None], queued: dict[str, Any]) -> None:
        waiting: list[Event] = []
        number = 0
        written = asyncio.get_running_loop().time()
        try:
            async with self._turns:
                # Any gateway may have ended it, here and below.
                if not await self.store.advance(turn.stored_response({**queued, "status": "in_progress"})):
                    return
                # Its HTTP status was sent long ago, and its client waits for the id.
                async for each in complete(made, turn.shown, held=0):
                    waiting.append(each)
                    number = each.get("sequence_number", number) + 1
                    now = asyncio.get_running_loop().time()
                    if each["type"] in LAST and await self.store.unfinished(turn.id):
                        await self.keep(turn, each["response"], lambda: _rows(waiting))
                    elif now - written > FLUSH_S or "response" in each:
                        if not await self.store.add_events(turn.id, _rows(waiting)):
                            return
                        waiting.clear()
                        written = now
        except Exception as error:
            await made.aclose()
            body = failed(queued, translate(error))
            end = {"type": "response.failed", "sequence_number": number, "response": body}
            await self._fail(turn.stored_response(body), [*(each for each in waiting if each["type"] not in LAST), end])
        finally:
            await made.aclose()

    async def _fail(self, kept: StoredResponse, events: list[Event]) -> None:
        """Stores that a response has failed, when the store takes it: else its clients would ask for ever how it ended."""
        while True:
            try:
                await self.store.advance(kept, _rows(events))
                return
            except sqlite3.Error as error:
                # For example, the disk is full.
                logger.error("the failure of a response cannot be stored yet: %s", error)
                await asyncio.sleep(TROUBLE_S)

    async def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancels a background response; one that has ended is not changed.  Raises `ApiError`."""
        kept = await self.store.get(response_id, owner)
        if not kept.body["background"]:
            raise BadRequest("Only a response made in the background can be cancelled.", param="response_id")
        if kept.body["status"] in UNFINISHED:
            kept.body["status"] = "cancelled"
            is_ended = await self.store.advance(kept)
            # Where another gateway makes it, that one finds out when it next writes.
            if is_ended and response_id in self._making:
                _, task = self._making[response_id]
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return (await self.store.get(response_id, owner)).body

    async def delete(self, response_id: str, owner: str) -> None:
        """Deletes a response, and cancels it first if it is not finished.  Raises `NotFound`."""
        kept = await self.store.get(response_id, owner)
        if kept.body["status"] in UNFINISHED and kept.body["background"]:
            await self.cancel(response_id, owner)
        await self.store.delete(response_id, owner)

    async def follow(self, response_id: str, after: int) -> AsyncGenerator[str, None]:
        """The events of a background response with numbers greater than `after`, as JSON, until it has ended."""
        unfinished = True
        while unfinished:
            # Asked before the events are read, so that no event that comes in between is missed.
            unfinished = await self.store.unfinished(response_id)
            for number, each in await self.store.events(response_id, after):
                after = number
                yield each
                # A fast client takes thousands without a pause.
                await asyncio.sleep(0)
            if unfinished:
                await asyncio.sleep(FLUSH_S)


def _rows(events: list[Event]) -> list[Row]:
    return [(each.get("sequence_number", 0), json.dumps(each, separators=(",", ":"))) for each in events]


def _text(data: dict[str, Any], name: str) -> str | None:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise BadRequest(f"`{name}` must be a string.", param=name)
    return value


def _conversation_id(data: dict[str, Any]) -> str | None:
    value = data.get("conversation")
    if isinstance(value, dict):
        value = value.get("id")
    if value is not None and not isinstance(value, str):
        raise BadRequest("`conversation` must be an id, or an object with one.", param="conversation")
    return value
