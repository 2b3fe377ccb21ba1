"""What vLLM lacks of OpenAI's tool calling: kinds of tools, `allowed_tools`, grammars, the chunk that ends a call.  Pure."""

import json
from typing import Any

from gateway.http.errors import BadRequest
from gateway.http.sse import event

CLIENTS = ("function", "custom", "namespace")
"""Kinds of tools that clients run themselves; tools of other kinds would run on the server."""
DISPENSABLE = ("web_search", "image_generation")
"""Tools of the server that agents offer by default, and do without where the model does not call them."""


def callable_tools(data: dict[str, Any]) -> dict[str, Any]:
    """`data` of a response with the tools that can be called: without `DISPENSABLE`, and without the grammars of inputs.

    A tool is left out only beside tools of the client, and only where no call is forced.  Raises `BadRequest` for others.
    """
    tools = data.get("tools")
    if not isinstance(tools, list):
        return data
    kept = [each for each in tools if not (isinstance(each, dict) and each.get("type") in DISPENSABLE)]
    tools = kept if kept and data.get("tool_choice") in (None, "auto", "none") else tools
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type", "function") not in CLIENTS:
            raise BadRequest("`tools`: there are no tools on the server; only functions can be called.", param="tools")
    return {**data, "tools": [_with_free_input(each) for each in tools]}


def _with_free_input(tool: Any) -> Any:
    """A custom tool whose grammar, which vLLM cannot enforce, is part of its description."""
    form = tool.get("format") if isinstance(tool, dict) and tool.get("type") == "custom" else None
    if not isinstance(form, dict) or form.get("type") != "grammar" or not isinstance(tool.get("description"), str | None):
        return tool
    advice = f"The input must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
    description = "\n\n".join(filter(None, (tool.get("description"), advice)))
    return {**tool, "format": {"type": "text"}, "description": description}


def only_allowed(data: dict[str, Any]) -> dict[str, Any]:
    """`data`, reduced to the allowed tools if its `tool_choice` is of the type `allowed_tools`.  Raises `BadRequest`."""
    if not named_tools(data):
        return data
    choice = data["tool_choice"]
    # Chat completions nest the list one level deeper than responses.
    allowed = choice.get("allowed_tools", choice)
    tools, mode = data.get("tools"), allowed.get("mode") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(allowed.get("tools"), list):
        raise BadRequest("`tool_choice`: `allowed_tools` needs a mode, `auto` or `required`, and tools.", param="tool_choice")
    names = [_name(each) for each in allowed["tools"]]
    kept = [each for each in tools if _name(each) in names] if isinstance(tools, list) else []
    if not kept or None in names or len({_name(each) for each in kept}) < len(set(names)):
        raise BadRequest("`tool_choice` names a tool that is not in `tools`.", param="tool_choice")
    return {**data, "tools": kept, "tool_choice": mode}


def named_tools(data: dict[str, Any]) -> dict[str, Any]:
    """The two fields that `only_allowed` would change; empty if it would not."""
    choice = data.get("tool_choice")
    allowed = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    return {name: data.get(name) for name in ("tools", "tool_choice")} if allowed else {}


def _name(tool: Any) -> str | None:
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        tool = tool["function"]
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else None


async def split_off_finish(chunk: str) -> str:
    """A chat's chunk, with `finish_reason` moved from one with tool calls into a chunk of its own, as OpenAI sends it.

    OpenAI's clients consider the tool calls of earlier chunks complete when such a chunk comes.
    """
    if '"finish_reason":"' not in chunk or '"tool_calls":[{' not in chunk:
        return chunk
    last = json.loads(chunk.removeprefix("data: "))
    choices = last["choices"]
    calls = event({**last, "choices": [{**each, "finish_reason": None} for each in choices]})
    return (calls + event({**last, "choices": [{**each, "delta": {}, "logprobs": None} for each in choices]})).decode()
