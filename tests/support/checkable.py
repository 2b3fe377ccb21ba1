"""Requests whose answers a grammar restricts to a few, whatever the model would generate."""

import json
from typing import Any, Literal

from pydantic import BaseModel

COLOURS = ("red", "green", "blue")
QUESTION: Any = [{"role": "user", "content": "Which colour?"}]
CHOICE = {"structured_outputs": {"choice": list(COLOURS)}}
"""`extra_body` that restricts a plain text to one of the colours."""


class Paint(BaseModel):
    """A coat of paint."""

    colour: Literal["red", "green", "blue"]
    coats: Literal[1, 2, 3]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": list(COLOURS)}, "coats": {"type": "integer", "enum": [1, 2, 3]}},
    "required": ["colour", "coats"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
TEXT_FORMAT: Any = {"format": {"type": "json_schema", "name": "paint", "schema": SCHEMA, "strict": True}}

PAINT: Any = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "paint"}}
FLAT_PAINT: Any = {"type": "function", "name": "paint", "description": "Paints.", "parameters": SCHEMA, "strict": True}
FLAT_NAMED: Any = {"type": "function", "name": "paint"}


def paint_of(text: str | None) -> Paint:
    return Paint.model_validate(json.loads(text or ""))
