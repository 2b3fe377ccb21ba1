"""One request for a response: its place in a conversation, and its response object.  Pure, except that it draws ids."""

import re
import uuid
from dataclasses import dataclass
from typing import Any

from backend.engine.front import ResponseRequest, decode_custom_tool_input_prefix
from backend.engine.front.messages import is_object
from gateway.fleet.statistics import SpeculationOptions
from gateway.http.errors import BadRequest
from gateway.storage.responses.store import Item, StoredResponse

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
MAX_ID = 256
_FROM_VLLM = ("status", "output", "usage", "incomplete_details", "temperature", "top_p", "created_at", "model")
"""Fields taken from vLLM's response object; the gateway fills in the others."""


@dataclass(frozen=True)
class Turn:
    """One request.  `input` are its own items; `request` is vLLM's request, with all earlier items before them."""

    request: ResponseRequest
    echo: dict[str, Any]
    """Fields of the request that the response repeats.  A copy, because vLLM changes `request` while it serves it."""
    owner: str
    input: list[Item]
    store: bool
    background: bool
    streamed: bool
    """Whether the client asked for a stream."""
    previous: str | None
    conversation: str | None
    speculation: SpeculationOptions | None = None
    """What it asks of speculation."""

    @property
    def id(self) -> str:
        return str(self.request.request_id)

    def shown(self, made: dict[str, Any]) -> dict[str, Any]:
        """The response object for clients, made from vLLM's, or from the few fields known before there is one."""
        echo = self.echo
        usage = made.get("usage")
        if usage is not None:
            usage = {
                **usage,
                "input_tokens_details": _only(usage["input_tokens_details"], "cached_tokens"),
                "output_tokens_details": _only(usage["output_tokens_details"], "reasoning_tokens"),
            }
        return {
            "id": self.id,
            "object": "response",
            "background": self.background,
            "conversation": None if self.conversation is None else {"id": self.conversation},
            "error": None,
            "instructions": echo["instructions"],
            "max_output_tokens": echo["max_output_tokens"],
            "max_tool_calls": echo["max_tool_calls"],
            "metadata": echo["metadata"] or {},
            "parallel_tool_calls": echo["parallel_tool_calls"],
            "previous_response_id": self.previous,
            "prompt_cache_key": echo["prompt_cache_key"],
            "reasoning": echo["reasoning"] or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self.store,
            "text": echo["text"] or {"format": {"type": "text"}},
            "tool_choice": echo["tool_choice"] if echo["tools"] else "auto",
            "tools": echo["tools"],
            "top_logprobs": echo["top_logprobs"],
            "truncation": echo["truncation"],
            "user": echo["user"],
            **{name: made.get(name) for name in _FROM_VLLM},
            "output": _ended(made.get("output"), made.get("status")),
            "usage": usage,
        }

    def stored_response(self, body: dict[str, Any]) -> StoredResponse:
        return StoredResponse(self.id, self.owner, self.previous, self.input, body)


def as_items(value: Any, field: str = "input") -> list[Item]:
    """A request's `field` as a list of items, each with an id.  Raises `BadRequest`."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRequest(f"`{field}` must be a string or a list of items.", param=field)
    return [_whole(item, field) for item in value]


def _whole(item: Item, field: str) -> Item:
    """An item, completed by the fields that clients may leave out.  Raises `BadRequest`."""
    if not isinstance(item.get("id"), str | None) or len(item.get("id") or "") > MAX_ID:
        raise BadRequest(f"The `id` of an item must be a string of at most {MAX_ID} characters.", param=field)
    if isinstance(item.get("role"), str) and item.get("type", "message") == "message":
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        text = item.get("content")
        item = {"type": "message", **item, "content": [{"type": kind, "text": text}] if isinstance(text, str) else text}
    prefix = _PREFIXES.get(str(item.get("type", "message")), "item")
    return item if item.get("id") else {**item, "id": f"{prefix}_{uuid.uuid4().hex}"}


def _ended(output: list[Item] | None, status: object) -> list[Item] | None:
    """Output items.  If the response is incomplete, so is the last item, which vLLM marks as completed."""
    return [*output[:-1], cut_off(output[-1])] if status == "incomplete" and output else output


def cut_off(item: Item) -> Item:
    """The last item of an incomplete response: incomplete, unless it is a call with all its arguments.

    vLLM shows the JSON around a custom tool's input where it is cut.
    """
    if item["type"] == "function_call" and is_object(item["arguments"]):
        return item
    if item["type"] == "custom_tool_call":
        start = re.sub(r"\s", "", item["input"][:32])
        if not (start.startswith(_WRAPPED) or _WRAPPED.startswith(start)):
            return item
        item = {**item, "input": decode_custom_tool_input_prefix(item["input"])}
    return {**item, "status": "incomplete"}


_WRAPPED = '{"input"'


def _only(details: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: details.get(name) or 0}
