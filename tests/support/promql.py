"""Finds the metrics and labels that a PromQL expression names.  It does not check the grammar: promtool does."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""\s+|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<duration>\d+(?:ms|[smhdwy]))|(?P<number>\d+(?:\.\d+)?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_:]*)|(?P<sign>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],:])""",
    re.VERBOSE,
)
_WORDS = {"and", "or", "unless", "bool", "offset"}
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}


class Names(NamedTuple):
    """`metrics` with the labels in their selectors; `labels` in `by (...)`, `on (...)` and similar clauses."""

    metrics: dict[str, set[str]]
    labels: set[str]


def names(expression: str) -> Names:
    """The names in an expression.  Raises `ValueError` for text that is no PromQL token."""
    tokens = _tokens(expression)
    found = Names({}, set())
    index = 0
    while index < len(tokens):
        kind, text = tokens[index]
        following = tokens[index + 1][1] if index + 1 < len(tokens) else ""
        index += 1
        if kind != "name" or text in _WORDS:
            continue
        if text in _LABEL_LISTS and following == "(":
            index = _labels(tokens, index + 1, ")", found.labels)
        elif following in ("(", "by", "without"):
            continue
        else:
            labels = found.metrics.setdefault(text, set())
            if following == "{":
                index = _labels(tokens, index + 1, "}", labels)
    return found


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise ValueError(f"no PromQL at {expression[at : at + 20]!r}")
        if match.lastgroup:
            tokens.append((match.lastgroup, match[0]))
        at = match.end()
    return tokens


def _labels(tokens: list[tuple[str, str]], index: int, end: str, found: set[str]) -> int:
    while tokens[index][1] != end:
        if tokens[index][0] == "name":
            found.add(tokens[index][1])
        index += 1
    return index + 1
