"""How large each part of a request may be: one table, and a check in time linear in the body's size.  Pure.

The check works on parsed JSON, before any request model is built.  Each bound is far above what the field is for, and so low
that no part of a request holds the event loop for long.  `docs/reference/limits.md` has the table; a test compares them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.http.errors import BadRequest, ContextTooLong, PayloadTooLarge

MAX_STRUCTURE = 300_000
"""Most commas and opening brackets in a body.  The parser holds the interpreter for 0.1 us for each of them."""
MAX_DEPTH = 64
"""Most lists and objects nested in each other; vLLM's own bound for the depth of a schema."""
MAX_CHOICES = 64
"""Largest `n` of one request."""
MAX_REGEX = 1 << 14
"""Most characters of a regular expression."""
MAX_TEXT_PER_TOKEN = 8
"""Most characters of text per token of context.  Longer text would not fit, and the tokenizer, which takes seconds per million
characters, is too slow to find that out."""
MIN_TEXT = 1 << 16
"""Characters of text that are always accepted, however short the context is."""


class Bound(NamedTuple):
    """The bounds of one field; None: unbounded here."""

    items: int | None = 1024
    """Most entries of the field's list or object."""
    longest: int | None = None
    """Most characters of a single string in the field."""
    chars: int | None = 1 << 16
    """Most characters of all strings and keys together."""
    values: int = 1 << 14
    """Most numbers, strings, lists and objects in the field, at any depth."""


MAX_ITEMS = 2048
"""Items that a response is made from, and messages."""
SCHEMA = Bound(items=None, chars=1 << 18, values=20_000)
"""For a JSON schema, regex, grammar or list of choices.  Its compile time is limited elsewhere."""
TEXT = Bound(items=MAX_ITEMS, chars=None, values=25_000)
"""For text that becomes a prompt; `check_text` bounds its characters."""

STOPS = Bound(items=64, longest=256, chars=4096)
"""For stop strings, each of which is looked for in all text that is generated."""

FIELDS: Mapping[str, Bound] = {
    "allowed_token_ids": Bound(items=4096),
    "bad_words": Bound(items=128, longest=256, chars=4096),
    "chat_template_kwargs": Bound(items=64),
    "data_1": TEXT,
    "data_2": TEXT,
    "documents": TEXT,
    "input": Bound(items=4096, chars=None, values=MAX_STRUCTURE),
    "instructions": TEXT,
    "items": TEXT,
    "logit_bias": Bound(items=1024),
    "logprob_token_ids": Bound(items=128),
    "messages": TEXT,
    "metadata": Bound(items=16, longest=512),
    "model": Bound(chars=256),
    "prediction": TEXT,
    "prompt": Bound(items=None, chars=None, values=MAX_STRUCTURE),
    "prompt_embeds": Bound(chars=None),
    "queries": TEXT,
    "query": TEXT,
    "request_id": Bound(chars=128),
    "response_format": SCHEMA,
    "stop": STOPS,
    "stop_sequences": STOPS,
    "stop_token_ids": Bound(items=256),
    "structured_outputs": SCHEMA,
    "suffix": TEXT,
    "system": TEXT,
    "text": SCHEMA,
    "text_1": TEXT,
    "text_2": TEXT,
    "sampling_params": SCHEMA,
    "token_ids": Bound(items=None, values=MAX_STRUCTURE),
    "tokens": Bound(items=None, values=MAX_STRUCTURE),
    "tool_choice": Bound(chars=4096),
    "tools": Bound(chars=1 << 20, values=50_000),
    "user": Bound(chars=512),
}
"""Bounds by field name; a field that is not listed has the bounds `Bound()`."""

SCORED = frozenset({"data_1", "queries", "query", "text_1"})
"""One of these is in each request that scores pairs of texts."""
TEXTS = ("messages", "input", "items", "system", "instructions", "tools", "documents", "suffix", "prompt", "data_2", "text_2")
"""The other fields of text that is tokenized."""
TAKEN_TEMPLATE_ARGUMENTS = frozenset({"chat_template", "conversation", "messages", "self", "tokenize"})
"""Forbidden in `chat_template_kwargs`, because the renderer passes these itself."""
MEDIA = frozenset({"audio_url", "file", "image_url", "input_audio", "source", "video_url"})
"""Keys of message parts whose strings are media or links, not text."""
LABELS = MEDIA | {"id", "role", "status", "type"}
"""`MEDIA`, and keys of response items whose strings are long where the text is short."""
PARTS: Mapping[str, int] = {"content": 1024, "output": 1024, "summary": 1024, "tool_calls": 128}
"""Most entries of these lists, within each entry of `messages` and `input`."""


def check_structure(body: bytes | bytearray) -> None:
    """Refuses a body that would take long to parse, after a fast scan of its bytes.  Raises `PayloadTooLarge`."""
    if len(body) > MAX_STRUCTURE and body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_STRUCTURE:
        raise PayloadTooLarge(f"The request body has more than {MAX_STRUCTURE} values.")


def check_bounds(data: Mapping[str, Any]) -> None:
    """Raises `BadRequest` naming the first field that is larger than its bound."""
    for name, value in data.items():
        if isinstance(value, str | list | dict):
            _check_field(name[:64], value)
    _check_parts(data)


def _check_parts(data: Mapping[str, Any]) -> None:
    """Checks single fields beyond their size.  Raises `BadRequest`."""
    grammar = data.get("structured_outputs")
    if isinstance(grammar, dict) and isinstance(grammar.get("regex"), str) and len(grammar["regex"]) > MAX_REGEX:
        raise BadRequest(f"`structured_outputs.regex` has more than {MAX_REGEX} characters.", param="structured_outputs")
    arguments = data.get("chat_template_kwargs")
    if isinstance(arguments, dict):
        for name in sorted(TAKEN_TEMPLATE_ARGUMENTS & arguments.keys()):
            raise BadRequest(f"`chat_template_kwargs` must not contain `{name}`.", param="chat_template_kwargs")
        for name in ("documents", "tools"):
            if not isinstance(arguments.get(name), list | None):
                raise BadRequest(f"`chat_template_kwargs.{name}` must be a list.", param="chat_template_kwargs")
    prompt = data.get("prompt")
    if isinstance(prompt, list):
        # Checked here, because pydantic would report every wrong entry of a long list.
        kinds = set(map(type, prompt))
        if kinds not in (set(), {int}, {str}) and (kinds != {list} or any(set(map(type, each)) - {int} for each in prompt)):
            raise BadRequest("`prompt` must be text, token ids, or a list of either.", param="prompt")
        if kinds & {str, list} and not all(prompt):
            raise BadRequest("`prompt` must not contain an empty prompt.", param="prompt")
    messages = data.get("messages")
    # /v1/chat/completions/batch takes a list of conversations, each a list of messages.
    for conversation in messages if isinstance(messages, list) and set(map(type, messages)) == {list} else (messages,):
        _check_messages(conversation)
    for name in ("tokens", "token_ids"):
        _check_entries(name, data.get(name), int)


def _check_entries(name: str, entries: Any, kind: type) -> None:
    if isinstance(entries, list) and set(map(type, entries)) - {kind}:
        index = next(i for i, each in enumerate(entries) if type(each) is not kind)
        raise BadRequest(f"`{name}[{index}]` must be {'an object' if kind is dict else 'an integer'}.", param=name)


def _check_messages(messages: Any) -> None:
    _check_entries("messages", messages, dict)
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"`messages[{index}].role` must be a string.", param="messages")
        content = message.get("content")
        if not isinstance(content, str | list | None) or (content is None and message["role"] in ("system", "user")):
            raise BadRequest(f"`messages[{index}].content` must be a string or a list of parts.", param="messages")
        if isinstance(content, list) and set(map(type, content)) - {dict, str}:
            raise BadRequest(f"`messages[{index}].content` has a part that is no object.", param="messages")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and not isinstance(part.get("text"), str | None):
                raise BadRequest(f"`messages[{index}].content[{at}].text` must be a string.", param="messages")


def count_prompts(prompt: Any) -> int:
    """How many prompts the field `prompt` holds: text, token ids, or a list of either."""
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1


def grammar_field(data: Mapping[str, Any]) -> str:
    """The name of the request's field that constrains the form of its output."""
    for name in ("structured_outputs", "response_format", "text"):
        value = data.get(name)
        if value and (name != "text" or (isinstance(value, dict) and "format" in value)):
            return name
    return "tools" if data.get("tools") else "structured_outputs"


def check_text(data: Mapping[str, Any], context: int) -> None:
    """Refuses text that is far beyond `context` tokens, before it is tokenized.  Raises `ContextTooLong`."""
    scores = not SCORED.isdisjoint(data)
    for name in (*TEXTS, *SCORED):
        value = data.get(name)
        if isinstance(value, list) and set(map(type, value)) == {str}:
            # Each text is a prompt, and may fill the context.
            value = max(value, key=len)
        # So may each object, where pairs are scored.  Longer lists are refused elsewhere.
        for each in value if scores and isinstance(value, list) and len(value) <= MAX_ITEMS else (value,):
            _check_length(name, each, context)


def check_items(items: list[Any], context: int, *, history: bool) -> None:
    """Bounds what a response is made from: `input`, with a `history` before it or without.  Raises `BadRequest`."""
    try:
        _check_field("input", items)
        _check_length("input", items, context)
    except BadRequest as error:
        message = error.message + (" What came before it counts." if history else "")
        raise type(error)(message, param="input") from None


def _check_length(name: str, value: Any, context: int) -> None:
    if not isinstance(value, str | list | dict):
        return
    bound, limit = _bound(name, value), max(MIN_TEXT, MAX_TEXT_PER_TOKEN * context)
    _check_count(name, value, bound)
    if _measure(value, LABELS if name in ("input", "items") else MEDIA, bound.values).chars > limit:
        raise ContextTooLong.of(context, f"`{name}` has more than {limit} characters", param=name)


def _bound(name: str, value: str | list[Any] | dict[str, Any]) -> Bound:
    """The bound of a field: `input` may be what a response is made from, or texts to embed."""
    is_items = name == "input" and isinstance(value, list) and dict in set(map(type, value))
    return TEXT if is_items else FIELDS.get(name, Bound())


def _check_count(name: str, value: str | list[Any] | dict[str, Any], bound: Bound) -> None:
    if bound.items is not None and not isinstance(value, str) and len(value) > bound.items:
        raise _too_much(name, bound.items, "entries")


def _check_field(name: str, value: str | list[Any] | dict[str, Any]) -> None:
    bound = _bound(name, value)
    _check_count(name, value, bound)
    found = _measure(value, most=bound.values)
    if found.depth > MAX_DEPTH:
        raise _too_much(name, MAX_DEPTH, "levels of lists and objects")
    if found.values > bound.values:
        raise _too_much(name, bound.values, "values")
    if bound.longest is not None and found.longest > bound.longest:
        raise _too_much(name, bound.longest, "characters in one string")
    if bound.chars is not None and found.chars > bound.chars:
        raise _too_much(name, bound.chars, "characters")
    if name in ("messages", "input") and isinstance(value, list):
        for index, entry in enumerate(value):
            for part, most in PARTS.items() if isinstance(entry, dict) else ():
                if isinstance(entry.get(part), list) and len(entry[part]) > most:
                    raise BadRequest(f"`{name}[{index}].{part}` has more than {most} entries.", param=name)


def _too_much(name: str, most: int, of_what: str) -> BadRequest:
    return BadRequest(f"`{name}` has more than {most} {of_what}.", param=name)


class _Size(NamedTuple):
    depth: int
    values: int
    chars: int
    longest: int


def _measure(value: Any, without: frozenset[str] = frozenset(), most: int = MAX_STRUCTURE) -> _Size:
    """The size of a JSON value, except for values under the keys `without`.

    Goes level by level, flat lists in one go.  Stops once there are more values than `most`.
    """
    depth = values = chars = longest = 0
    level: list[Any] = [value]
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        values += len(level)
        if values > most:
            break
        nested = False
        for each in level:
            if isinstance(each, str):
                chars += len(each)
                longest = max(longest, len(each))
            elif isinstance(each, dict):
                nested = True
                below.extend(under for key, under in each.items() if key not in without)
                chars += sum(map(len, each))
            elif isinstance(each, list):
                nested = True
                kinds = set(map(type, each))
                if kinds == {str}:
                    values += len(each)
                    chars += sum(map(len, each))
                    longest = max(longest, *map(len, each))
                elif kinds & {str, list, dict}:
                    below.extend(each)
                else:
                    values += len(each)
        depth += nested
        level = below
    return _Size(depth, values, chars, longest)
