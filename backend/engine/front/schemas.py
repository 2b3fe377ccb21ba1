"""Names what xgrammar would silently ignore of a JSON schema or a regular expression.  Pure.

Of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, xgrammar follows the first that a schema has, and ignores all
keywords beside it that do not belong to it.  What is not known to be kept is named here.  llguidance does so itself, but for
`minProperties`.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    FormatChecker,
)
from jsonschema.exceptions import best_match

_DRAFTS = (Draft3Validator, Draft4Validator, Draft7Validator, Draft201909Validator, Draft202012Validator)
KEYWORDS = frozenset[str]({"then", "else", "minContains", "maxContains"}.union(*(each.VALIDATORS for each in _DRAFTS)))
"""All of any draft that restrict a value.  JSON Schema has other names say nothing about it."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_LENGTHS = {"minLength", "maxLength"}
_NAMES = {"patternProperties", "propertyNames"}
_MORE_PROPERTIES = ("additionalProperties", "unevaluatedProperties")
KEPT: dict[str, set[str]] = {
    "array": {"items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"},
    "boolean": set(),
    "integer": _BOUNDS,
    "null": set(),
    "number": _BOUNDS,
    "object": {"properties", "required", *_MORE_PROPERTIES, *_NAMES, "minProperties", "maxProperties"},
    "string": {"pattern", "format", *_LENGTHS},
}
"""Beside a `type`.  `_unkept` has the combinations that are not."""
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"),
    *("uri", "uri-reference", "uri-template", "uuid"),
}
"""Without those of JSON pointers, in which xgrammar lets quotation marks through."""
_ATOM = re.compile(r"\\(?:x..|u....|c.|.)|.", re.DOTALL)
_PIECE = re.compile(rf"\[\^?\]?(?:\\.|[^\\\]])*\]|\(\?:?|{_ATOM.pattern}", re.DOTALL)
_ESCAPED_IN_JSON = re.compile(r"""\\[nrtfv0c"\\]|["\x00-\x1f]|\\(?:x|u00)(?:[01].|22|5[cC])""")
"""Characters that JSON has only as escapes, as they stand in a pattern."""


def check_schema(given: Any) -> None:
    """Raises `ValueError`, which names a keyword that is wrong, or that xgrammar would ignore."""
    errors = Draft202012Validator(Draft202012Validator.META_SCHEMA, format_checker=FormatChecker(())).iter_errors(given)
    if (error := best_match(errors)) is not None:
        named = [part for part in error.absolute_path if isinstance(part, str)]
        raise ValueError(f"The JSON schema's {named[-1] if named else 'type'} is not what it should be.")
    try:
        keyword = _ignored(given)
    except RecursionError:
        raise ValueError("The JSON schema goes in circles.") from None
    if keyword is not None:
        raise ValueError(
            f"{keyword}, as this schema has it, would be ignored by xgrammar: see Structured outputs in docs/reference/api.md."
        )


def check_least_properties(given: Any) -> None:
    """Raises `ValueError` where llguidance would not keep `minProperties`: a name that comes twice counts twice there."""
    todo = [given]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            todo += (value for name, value in part.items() if name not in ("const", "enum"))
            least, required = part.get("minProperties"), part.get("required")
            distinct = max(1, len(required) if isinstance(required, list) else 0)
            names_are_open = "patternProperties" in part or part.get("additionalProperties", True) is not False
            if isinstance(least, int) and least > distinct and names_are_open:
                raise ValueError("minProperties would not be kept by llguidance, as a name may come twice.")


def check_regex(pattern: str) -> None:
    """Raises `ValueError` for what xgrammar would ignore of a regular expression."""
    if _lossy(pattern, in_json=False):
        raise ValueError("The regex has a look-around, a group's flag, or an anchor in the middle: xgrammar would ignore it.")


def schemas_of_tag(text: str) -> Iterator[dict[str, Any]]:
    """The JSON schemas in a structural tag.  What is no JSON is left to vLLM."""
    todo: list[Any] = []
    with contextlib.suppress(json.JSONDecodeError):
        todo.append(json.loads(text))
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name not in ("json_schema", "schema"):
                    todo.append(value)
                elif isinstance(value, dict) and value:
                    yield value


def _ignored(root: Any) -> str | None:
    todo, followed = [root], set()
    while todo:
        schema = todo.pop()
        if not isinstance(schema, dict):
            continue
        if (keyword := _unkept(schema, root)) is not None:
            return keyword
        if "$ref" in schema:
            if schema["$ref"] not in followed:
                followed.add(schema["$ref"])
                todo.append(_target(schema, root))
        elif "const" not in schema and "enum" not in schema:
            todo += _inside(schema)
    return None


def _inside(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("properties", "patternProperties"):
        yield from schema.get(name, {}).values()
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from schema.get(name, ())
    yield from (schema.get(name) for name in ("items", "unevaluatedItems", *_MORE_PROPERTIES))
    if isinstance(names := schema.get("propertyNames"), dict):
        yield {"type": "string", **names}


def _target(schema: Any, root: Any) -> Any:
    """What a `$ref` leads to, or `schema` if it has none; read as xgrammar does, which knows no escapes."""
    ref = schema.get("$ref") if isinstance(schema, dict) else None
    if ref is None:
        return schema
    found = root
    for part in filter(None, ref[1:].split("/")):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _unkept(schema: dict[str, Any], root: Any) -> str | None:
    """A keyword that is ignored, of the schema itself."""
    keywords = KEYWORDS & schema.keys()
    if "$ref" in keywords:
        here = schema["$ref"] == "#" or schema["$ref"].startswith("#/")
        return min(keywords - {"$ref"}, default=None) if here else "$ref"
    if values := _values(schema):
        return next(filter(None, (_breaks(value, schema, root) for value in values)), None)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in keywords:
            kept = name == "anyOf" or (name == "allOf" and len(schema[name]) == 1)
            kept = kept or (name == "oneOf" and all(_disjoint(*pair, root) for pair in itertools.combinations(schema[name], 2)))
            if "type" in keywords and all(_within(each, _types(schema), root) for each in schema[name]):
                keywords -= {"type"}
            return min(keywords - {name}, default=None) if kept else name
    types = _types(schema)
    if rest := keywords - {"type"}.union(*(KEPT[each] for each in types)):
        return min(rest)
    if not types:
        return "type" if "type" in keywords else None
    if "string" in types and (keyword := _unkept_of_string(schema, keywords)):
        return keyword
    return _unkept_of_object(schema, keywords) if "object" in types else None


def _unkept_of_string(schema: Mapping[str, Any], keywords: frozenset[str]) -> str | None:
    if "format" in keywords:
        return "format" if schema["format"] not in FORMATS else min(keywords & {"pattern", *_LENGTHS}, default=None)
    if "pattern" in keywords:
        return "pattern" if _lossy(schema["pattern"]) else min(keywords & _LENGTHS, default=None)
    return None


def _unkept_of_object(schema: Mapping[str, Any], keywords: frozenset[str]) -> str | None:
    if not schema.get("properties", {}).keys() >= set(schema.get("required", ())):
        return "required"
    if names := keywords & _NAMES:
        beside = keywords & {"properties", "unevaluatedProperties"} or len(names) > 1
        closed = "propertyNames" in names and schema.get("additionalProperties") is False
        patterns = schema.get("patternProperties", {})
        if beside or closed or len(patterns) > 1 or any(map(_lossy, patterns)):
            return min(names)
    # A name that comes twice counts twice.
    if "minProperties" in keywords and (names or any(schema.get(name, False) is not False for name in _MORE_PROPERTIES)):
        return "minProperties"
    return None


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    if "type" in schema:
        return (schema["type"],) if isinstance(schema["type"], str) else tuple(schema["type"])
    if not schema.keys().isdisjoint(("properties", *_MORE_PROPERTIES)):
        return ("object",)
    return () if schema.keys().isdisjoint(("items", "prefixItems", "unevaluatedItems")) else ("array",)


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _breaks(value: Any, schema: Any, root: Any) -> str | None:
    """The keyword of a schema that a value breaks."""
    error = best_match(Draft202012Validator(root).evolve(schema=schema).iter_errors(value))
    return None if error is None else str(error.absolute_schema_path[0])


def _within(schema: Any, types: tuple[str, ...], root: Any) -> bool:
    """Whether all values of a schema are of these types."""
    schema = _target(schema, root)
    if not isinstance(schema, dict):
        return False
    if values := _values(schema):
        return all(_breaks(value, {"type": list(types)}, root) is None for value in values)
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            return all(_within(each, types, root) for each in schema[name])
    allowed = {*types, "integer"} if "number" in types else {*types}
    return bool(_types(schema)) and allowed.issuperset(_types(schema))


def _disjoint(one: Any, other: Any, root: Any) -> bool:
    """Whether it is certain that no value matches both: then `oneOf` says what `anyOf` does, which xgrammar makes of it."""
    one, other = _target(one, root), _target(other, root)
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return False
    if values := _values(one) or _values(other):
        against = other if _values(one) else one
        return all(_breaks(value, against, root) for value in values)
    types = [{"number" if each == "integer" else each for each in _types(schema)} for schema in (one, other)]
    if types[0] and types[1] and types[0].isdisjoint(types[1]):
        return True
    shared = set(one.get("required", ())) & set(other.get("required", ())) if types[0] == types[1] == {"object"} else ()
    return any(_disjoint(one.get("properties", {}).get(name), other.get("properties", {}).get(name), root) for name in shared)


def _lossy(pattern: str, in_json: bool = True) -> bool:
    """Whether xgrammar ignores a part of a pattern, or lets through what must be escaped in JSON."""
    depth = 0
    for found in _PIECE.finditer(pattern):
        piece, start, end = found[0], found.start(), found.end()
        depth += piece.startswith("(") - (piece == ")")
        anchored = piece == "^" and start and (depth or pattern[start - 1] != "|")
        anchored = anchored or (piece == "$" and end < len(pattern) and (depth or pattern[end] != "|"))
        if anchored or piece == "(?" or (in_json and not piece.startswith("[^") and _named(piece)):
            return True
    return False


def _named(piece: str) -> bool:
    atoms = _ATOM.findall(piece[1:-1]) if piece.startswith("[") else [piece]
    return any(_ESCAPED_IN_JSON.match(atom) for atom in atoms)
