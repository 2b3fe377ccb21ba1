"""The demo corpus: the Python source of the running interpreter's standard library, cut into two disjoint splits.

Decides which files are used, shortens files that are mostly data, and assigns each file to the training or validation split.
The result depends only on the files on disk: two runs with the same interpreter give the same documents in the same order.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VALIDATION_PER_MILLE = 20
MAX_DOCUMENT_CHARS = 200_000
MAX_TABLE_CHARS = 3_000
TABLE_DENSITY = 0.15
SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data"})


@dataclass(frozen=True, slots=True)
class Document:
    """One source file: its path relative to the root it was found under (POSIX form) and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of both splits; no file, and no copy of a file, is in both."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def is_validation(name: str) -> bool:
    """Whether the file called `name` is left out of training (about 2 percent of names, by hash)."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < VALIDATION_PER_MILLE


def is_table(text: str) -> bool:
    """Whether a file is mostly data: more than `TABLE_DENSITY` of its non-space characters are digits and backslashes."""
    dense = "".join(text.split())
    if not dense:
        return True
    return sum(character.isdigit() or character == "\\" for character in dense) / len(dense) > TABLE_DENSITY


def load_corpus(root: Path | None = None) -> Corpus:
    """Read `root` (default: the standard library) into a training and a validation split.

    A file with exactly the text of an earlier one is dropped, so that no text is in both splits.
    """
    train: list[Document] = []
    validation: list[Document] = []
    seen: set[str] = set()
    for document in _documents(root or Path(sysconfig.get_path("stdlib"))):
        if document.text in seen:
            continue
        seen.add(document.text)
        (validation if is_validation(document.name) else train).append(document)
    return Corpus(train=tuple(train), validation=tuple(validation))


def _documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_DIRECTORIES.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # deliberately undecodable test data
        if not text.strip():
            continue
        limit = MAX_TABLE_CHARS if is_table(text) else MAX_DOCUMENT_CHARS
        yield Document(name=relative.as_posix(), text=_cut(text, limit))


def _cut(text: str, limit: int) -> str:
    """`text` if it has at most `limit` characters, else as many whole lines as fit in them."""
    if len(text) <= limit:
        return text
    return text[: text.rfind("\n", 0, limit) + 1]
