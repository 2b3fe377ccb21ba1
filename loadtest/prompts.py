"""Text to send, from the Python standard library's source, which every machine with Python has.  Reads files, nothing else.

Two domains: `code` as it stands, and `prose`, its docstrings.  The built-in demo model knows the first well and the second
less, and so does its drafter.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Domain = Literal["code", "prose"]
CHARACTERS_PER_TOKEN = 3.0
"""Roughly; the server's count of prompt tokens is in the report."""

_MODULES = ("argparse", "ast", "calendar", "configparser", "csv", "datetime", "decimal", "difflib", "fractions", "heapq")
_MORE = ("inspect", "locale", "mailbox", "optparse", "pickle", "random", "shutil", "statistics", "tarfile", "textwrap")


@cache
def sources() -> tuple[str, ...]:
    """The modules' text."""
    library = Path(sysconfig.get_path("stdlib"))
    return tuple((library / f"{name}.py").read_text(encoding="utf-8") for name in (*_MODULES, *_MORE))


@cache
def docstrings() -> tuple[str, ...]:
    """Docstrings of some length."""
    found = []
    for text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 120:
                    found.append(" ".join(docstring.split()))
    return tuple(found)


def prompt(domain: Domain, tokens: int, chance: random.Random) -> str:
    """About `tokens` tokens of a domain."""
    length = max(8, round(tokens * CHARACTERS_PER_TOKEN))
    return _window(sources(), length, chance) if domain == "code" else _joined(docstrings(), length, chance)


def _window(texts: Sequence[str], length: int, chance: random.Random) -> str:
    """A stretch of one text, from the beginning of a line."""
    text = chance.choice(texts)
    at = text.find("\n", chance.randrange(max(1, len(text) - 2 * length))) + 1
    return text[at : at + length]


def _joined(texts: Sequence[str], length: int, chance: random.Random) -> str:
    """As many texts as it takes, the first from its beginning."""
    joined = ""
    while len(joined) < length:
        joined += chance.choice(texts) + "\n"
    return joined[:length]
