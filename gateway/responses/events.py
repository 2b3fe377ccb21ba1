"""Turns the events that vLLM makes of a streamed response into those that OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pydantic

from gateway.errors import ApiError, translate
from gateway.sse import Dialect, event

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

    The first `held` events are held back until the next one comes.  An error before that raises `ApiError`.  A later error
    becomes a last event `response.failed`.
    """
    opening: list[Event] = []
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
        yield {"type": "response.failed", "sequence_number": number + 1, "response": failed(response, known)}
    finally:
        await events.aclose()


def failed(response: dict[str, Any], error: ApiError) -> dict[str, Any]:
    """The response object, marked as failed with `error`."""
    code = "server_error" if error.status >= 500 else (error.code or "invalid_prompt")
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}
