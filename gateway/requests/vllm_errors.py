"""Finds the request field that an error of vLLM or pydantic is about, and words the error for this server's users.  Pure."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from backend.engine.front import ChatCompletionRequest, CompletionRequest

_FIELDS = frozenset(ChatCompletionRequest.model_fields) | frozenset(CompletionRequest.model_fields)
_WORD = re.compile(r"`?([a-z][a-z_]+)`?")
_TYPES = frozenset({"bool", "dict", "float", "int", "list", "str"})
_TELLING: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"^Token id \d+ is out|decoder prompt|at least one prompt|^Either prompt"), "prompt"),
    (re.compile(r"empty conversation"), "messages"),
    (re.compile(r"tool choice|tool_choice"), "tool_choice"),
    (re.compile(r"structured outputs? constraint"), "structured_outputs"),
    (re.compile(r"[Cc]hat template is passed"), "chat_template"),
    (re.compile(r"multiple values for (?:keyword )?argument"), "chat_template_kwargs"),
    (re.compile(r"repetitive patterns"), "repetition_detection"),
)
_WORDINGS: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = (
    (
        re.compile(r"--enable-auto-tool-choice and --tool-call-parser|--tool-call-parser"),
        "the setting `gateway.tool_call_parser`",
    ),
    (re.compile(r"requires the setting (`[\w.]+`) to be set"), r"requires the setting \1"),
    (re.compile(r"^Chat template is passed with request.*", re.DOTALL), "Chat templates of requests are not accepted."),
    (re.compile(r"jinja2\.\S+ |\w+\.<locals>\.\S+ |safe_apply_chat_template\(\) "), "The chat template "),
    # In this server's settings, engine arguments keep vLLM's names.
    (re.compile(r"`?--([a-z][a-z-]+[a-z])`?"), lambda found: f"`verifier.engine_args.{found[1].replace('-', '_')}`"),
    (re.compile(r"(is greater than max allowed: \d+)"), r"\1 (the setting `verifier.engine_args.max_logprobs`)"),
    (re.compile(r" but none are specified: \{.*\}| but multiple are specified: \{.*\}", re.DOTALL), ""),
)


def field_of(message: str) -> str | None:
    """The request field that an error message is about, guessed from its words; None: unknown."""
    first = _WORD.match(message)
    if first is not None and first[1] in _FIELDS:
        return first[1]
    return next((field for pattern, field in _TELLING if pattern.search(message)), None)


def in_our_words(message: str) -> str:
    """The message with this server's settings instead of flags and internals of vLLM's own server."""
    for pattern, words in _WORDINGS:
        message = pattern.sub(words, message)
    return message


def most_telling(errors: Sequence[Any]) -> Any:
    """The one of pydantic's errors that helps the client most.

    Each member of a union reports its own errors.  Only errors of the member that is nearest to the value count: the one with
    the right role or type and the fewest missing fields.
    """
    first = [each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]]
    members: dict[tuple[Any, ...], list[Any]] = {}
    for each in first:
        members.setdefault(_member(each["loc"]), []).append(each)
    nearest = min(members.values(), key=lambda found: sum(_foreign(each) for each in found))
    return max(nearest, key=lambda each: (not each["type"].endswith("_type"), len(path_of(each))))


def _member(loc: Sequence[Any]) -> tuple[Any, ...]:
    """The location up to the name of a union's member."""
    for index, part in enumerate(loc):
        if isinstance(part, str) and not part.islower():
            return tuple(loc[: index + 1])
    return ()


def _foreign(error: Any) -> int:
    """How strongly an error suggests that another member was meant."""
    return 4 * _is_tag(error) + (1 if error["type"] == "missing" else 0)


def _is_tag(error: Any) -> bool:
    """Whether the error is about the field that tells the kinds of objects apart."""
    return error["type"] == "literal_error" and error["loc"][-1] in ("role", "type")


def is_about_all(error: Any) -> bool:
    """Whether an object as a whole is wrong: of another kind, without a required field, or with a forbidden one."""
    return len(error["loc"]) == 1 and (error["type"] in ("missing", "extra_forbidden") or _is_tag(error))


def path_of(error: Any) -> list[str]:
    """The path in the request at which the error is.  Names of union members are left out, because no client wrote them."""
    named: list[str] = []
    for part in error["loc"]:
        if isinstance(part, int) or (part.isidentifier() and part.islower() and part not in _TYPES):
            named.append(str(part))
    return named
