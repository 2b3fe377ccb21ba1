"""Anthropic's content blocks and tools that vLLM lacks: documents and search results become text; others are refused.  Pure."""

from typing import Any, get_args

from backend.engine.front import AnthropicContentBlock
from gateway.http.errors import BadRequest

_IN_MESSAGES: tuple[str, ...] = get_args(AnthropicContentBlock.model_fields["type"].annotation)
_IN_RESULTS = ("text", "image", "tool_reference")
"""Blocks of a tool's result that vLLM reads.  It drops others without a word."""


def readable(data: dict[str, Any]) -> dict[str, Any]:
    """A request, within its bounds, whose documents and search results are blocks of text.

    Raises `BadRequest` naming the type of a block or tool that is not supported.
    """
    _check_tools(data.get("tools"))
    messages = data.get("messages")
    if not isinstance(messages, list):
        return data
    return {**data, "messages": [_message(each) for each in messages]}


def _message(message: Any) -> Any:
    # A list of messages has passed the bounds, which know chats of many; its type is checked later.
    return {**message, "content": _blocks(message.get("content"), _IN_MESSAGES)} if isinstance(message, dict) else message


def _check_tools(tools: Any) -> None:
    """Refuses tools that Anthropic's API defines: the model does not know how to call them."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            raise _unsupported("tools", f"a tool of the type `{str(tool['type'])[:64]}`")


def _blocks(content: Any, kinds: tuple[str, ...]) -> Any:
    """The content of a message or of a tool's result, where blocks of these `kinds` may be."""
    return [_block(each, kinds) for each in content] if isinstance(content, list) else content


def _block(block: Any, kinds: tuple[str, ...]) -> Any:
    if not isinstance(block, dict):
        return block
    kind = block.get("type")
    if kind in ("document", "search_result"):
        return {"type": "text", "text": _text_of(block)}
    if kind not in kinds:
        raise _unsupported("messages", f"a block of the type `{str(kind)[:64]}`")
    return {**block, "content": _blocks(block.get("content"), _IN_RESULTS)} if kind == "tool_result" else block


def _text_of(block: dict[str, Any]) -> str:
    """All that a document or a search result says, its title first."""
    source = block.get("source")
    holder = source if isinstance(source, dict) else block
    body = holder.get("data") if holder.get("type") == "text" else holder.get("content")
    parts = [{"text": body}] if isinstance(body, str) else body
    if not isinstance(parts, list) or not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in parts):
        raise _unsupported("messages", f"a block of the type `{block['type']}` without text")
    about = (block.get("title"), source, block.get("context"))
    return "\n".join(each for each in (*about, *(part["text"] for part in parts)) if isinstance(each, str) and each)


def _unsupported(field: str, what: str) -> BadRequest:
    return BadRequest(f"`{field}`: {what} is not supported.", param=field)
