"""Pages of lists in OpenAI's format."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from backend.engine.front.deferred import in_turns
from gateway.http.errors import BadRequest


def page_of(oldest_first: Sequence[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """At most `limit` objects, those behind the id `after`.  Raises `BadRequest` for an unknown order or id."""
    if order not in ("asc", "desc"):
        raise BadRequest("`order` must be `asc` or `desc`.", param="order")
    ordered = list(oldest_first) if order == "asc" else list(reversed(oldest_first))
    if after is not None:
        places = [index for index, each in enumerate(ordered) if each["id"] == after]
        if not places:
            raise BadRequest("`after` is no id of this list.", param="after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }


def as_json(made: dict[str, Any] | msgspec.Struct) -> Response:
    """A JSON answer that may have megabytes of a client's own text, which `JSONResponse` takes ten times as long to encode."""
    return in_turns(msgspec.json.encode(made))
