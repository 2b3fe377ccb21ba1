"""One word, one meaning: names of the product that a reader could take for something else."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.support.processes import ROOT

FILES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for package in ("gateway", "backend", "outrider", "loadtest")
    for path in sorted((ROOT / package).rglob("*.py"))
}
WHERE = {"asked": "backend/speculation/deadlines.py"} | dict.fromkeys(
    ("doors", "hands", "said", "strays", "told", "wishes"), ""
)
"""Words that stood for many things, and the file in which one may still be a name."""


def names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_the_name_of_a_class_stands_for_one_class() -> None:
    found = defaultdict(list)
    for path, tree in FILES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_name_is_a_word_with_several_meanings() -> None:
    found = {(each.strip("_").lower(), path) for path, tree in FILES.items() for each in names(tree)}
    assert {(word, path) for word, path in found if word in WHERE and path != WHERE[word]} == set()
