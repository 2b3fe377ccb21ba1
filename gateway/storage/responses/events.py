"""Turns the events that vLLM makes of a streamed response into those that OpenAI's clients expect."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pydantic

from gateway.http.errors import ApiError, translate
from gateway.http.sse import Dialect, event
from gateway.storage.responses.turn import cut_off

_OPENING = 2
"""Number of events (`created`, `in_progress`) that vLLM sends before any verifier has the request."""

Shown = Callable[[dict[str, Any]], dict[str, Any]]
Event = dict[str, Any]

DIALECT = Dialect(
    lambda error: event({"type": "error", "code": error.code, "message": error.message, "param": error.param}, "error"),
    (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error"),
    silent=event({"type": "keepalive"}, "keepalive"),
)
"""Every event has a name.  The event `error` ends a stream that failed before the response had begun.  Codex counts events, and
not comments; but a client's first event must be `response.created`."""


async def complete(
    events: AsyncGenerator[pydantic.BaseModel, None], shown: Shown, held: int = _OPENING
) -> AsyncGenerator[Event, None]:
    """The events as JSON objects.  `shown` makes the response object in them.  The last event tells how the response ended.

    An item's end is held back until the next event tells whether it was cut off; the last event has the items of these ends.
    The first `held` events are held back until the next one comes.  An error before that raises `ApiError`.  A later error
    becomes a last event `response.failed`.
    """
    opening: list[Event] = []
    ending: list[Event] = []
    done: dict[str, Any] = {}
    response: dict[str, Any] = {}
    number = -1
    try:
        async for each in events:
            made = each.model_dump(mode="json", by_alias=True)
            number = made.get("sequence_number", number)
            if "response" in made:
                response = made["response"] = shown(made["response"])
            if made["type"] == "response.completed" and response["status"] != "completed":
                made["type"] = f"response.{response['status']}"
            if made["type"] == _INPUT or made["type"] not in _ENDINGS:
                if response.get("status") == "incomplete":
                    _cut(ending)
                for one in ending:
                    if "item" in one:
                        done[one["item"]["id"]] = one["item"]
                    yield one
                ending.clear()
            if "response" in made:
                response["output"] = [done.get(item["id"], item) for item in response["output"]]
            if made["type"] in _ENDINGS:
                ending.append(made)
                continue
            if len(opening) < held and number < held:
                opening.append(made)
                continue
            for one in opening:
                yield one
            opening.clear()
            yield made
    except Exception as error:
        known = translate(error)
        if opening or not response:
            raise known from None
        for one in ending:
            yield one
        yield {"type": "response.failed", "sequence_number": number + 1, "response": failed(response, known)}
    finally:
        await events.aclose()


_INPUT = "response.custom_tool_call_input.delta"
_ENDINGS = (_INPUT, "response.custom_tool_call_input.done", "response.output_item.done")
"""Events that vLLM makes of a whole item; of an input's deltas, the last one."""


def _cut(ending: list[Event]) -> None:
    """Makes the end of an item that of one that was cut off."""
    if not ending or "item" not in ending[-1]:
        return
    before = ending[-1]["item"]
    ending[-1]["item"] = item = cut_off(before)
    for each in ending[:-1] if item is not before else ():
        if each.get("delta") == before["input"]:
            # This repeats the whole of what vLLM shows of it; the input was in earlier deltas.
            each["delta"] = ""
        if "input" in each:
            each["input"] = item["input"]


def failed(response: dict[str, Any], error: ApiError) -> dict[str, Any]:
    """The response object, marked as failed with `error`."""
    code = "server_error" if error.status >= 500 else (error.code or "invalid_prompt")
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}
