"""The events of a streamed response, as OpenAI's clients read them; from those that vLLM's serving makes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pydantic

from gateway.errors import ApiError, translate
from gateway.sse import Dialect, event

_OPENING = 2
"""vLLM says that a response was created, and is in progress, before any verifier has its request."""

Shown = Callable[[dict[str, Any]], dict[str, Any]]
Event = dict[str, Any]

DIALECT = Dialect(
    lambda error: event({"type": "error", "code": error.code, "message": error.message, "param": error.param}, "error"),
    (b"event: response.completed", b"event: response.incomplete", b"event: response.failed", b"event: error"),
)
"""Every event is named.  Its error is for a stream that failed before anything was known of the response."""


async def complete(events: AsyncGenerator[pydantic.BaseModel, None], shown: Shown) -> AsyncGenerator[Event, None]:
    """Events as JSON objects, the response in them as `shown` makes it, and a last one that says how it ended.

    The first two are held back until something has come of the request.  Raises `ApiError` when nothing does; once they are
    out, an error is a last event `response.failed`.
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
            if len(opening) < _OPENING and number < _OPENING:
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
    """The response as one that failed."""
    code = "server_error" if error.status >= 500 else (error.code or "invalid_prompt")
    return {**response, "status": "failed", "error": {"code": code, "message": error.message}}
