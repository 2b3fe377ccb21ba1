"""OpenAI's lists: a page of objects that have ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.errors import BadRequest


def page_of(oldest_first: Sequence[dict[str, Any]], limit: int, order: str, after: str | None) -> dict[str, Any]:
    """At most `limit` of them from the one behind `after` on.  Raises `BadRequest` for an order or an id that is none."""
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
