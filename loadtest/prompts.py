"""Makes prompts from the source of Python's standard library, which every machine with Python has.  Only reads files.

There are two domains: `code` is source as it stands, `prose` its docstrings.  The built-in demo model and its drafter know code
well, and prose less well.
"""

import ast
import random
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

Domain = Literal["code", "prose"]
CHARACTERS_PER_TOKEN = 3.0
"""An estimate."""

_MODULES = ("argparse", "ast", "calendar", "configparser", "csv", "datetime", "decimal", "difflib", "fractions", "heapq")
_MORE = ("inspect", "locale", "mailbox", "optparse", "pickle", "random", "shutil", "statistics", "tarfile", "textwrap")


@cache
def sources() -> tuple[str, ...]:
    library = Path(sysconfig.get_path("stdlib"))
    return tuple((library / f"{name}.py").read_text(encoding="utf-8") for name in (*_MODULES, *_MORE))


@cache
def docstrings() -> tuple[str, ...]:
    """All docstrings of more than 120 characters."""
    found = []
    for text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 120:
                    found.append(" ".join(docstring.split()))
    return tuple(found)


def prompt(domain: Domain, tokens: int, chance: random.Random) -> str:
    """A text of about `tokens` tokens of a domain."""
    length = max(8, round(tokens * CHARACTERS_PER_TOKEN))
    return _window(sources(), length, chance) if domain == "code" else _joined(docstrings(), length, chance)


def _window(texts: Sequence[str], length: int, chance: random.Random) -> str:
    """A random part of one text, from the beginning of a line on."""
    text = chance.choice(texts)
    at = text.find("\n", chance.randrange(max(1, len(text) - 2 * length))) + 1
    return text[at : at + length]


def _joined(texts: Sequence[str], length: int, chance: random.Random) -> str:
    """Random texts joined and cut to `length` characters."""
    joined = ""
    while len(joined) < length:
        joined += chance.choice(texts) + "\n"
    return joined[:length]
