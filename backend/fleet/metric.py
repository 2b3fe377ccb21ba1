"""How a metric is exposed on `/metrics`, and which attributes of a class are metrics.  Pure data, in any process."""

import ast
from inspect import getsource
from itertools import pairwise
from typing import Literal, NamedTuple, get_type_hints


class Metric(NamedTuple):
    """One metric.  `Annotated[int, Metric("name")]` makes an attribute one; its docstring becomes the `help`."""

    name: str
    help: str = ""
    labels: tuple[str, ...] = ()
    """An attribute that is a dict or a list has one, with a value for each key or position."""
    buckets: tuple[float, ...] = ()
    """A histogram's."""
    known: tuple[str, ...] = ()
    """Values of its label exported as 0 from the start: `increase()` misses the first event of a series that begins with it."""

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        if self.name.endswith("_total"):
            return "counter"
        return "histogram" if self.buckets else "gauge"


def metrics_of(kind: type, *labels: str) -> dict[str, Metric]:
    """The metrics among a class's attributes, by attribute.  `labels` come before each one's own.

    Python keeps no docstrings of attributes, so they are read from the source, as pydantic reads those of its models.
    """
    (source,) = ast.parse(getsource(kind)).body
    assert isinstance(source, ast.ClassDef)
    docs = {
        ast.unparse(attribute.target): str(ast.literal_eval(doc.value))
        for attribute, doc in pairwise(source.body)
        if isinstance(attribute, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    found = {}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        for metric in getattr(annotation, "__metadata__", ()):
            text = " ".join(docs[name].partition("\n\n")[0].split()).removesuffix(".")
            # "HTTP" keeps its capitals.
            text = text if text[:2].isupper() else text[0].lower() + text[1:]
            found[name] = metric._replace(help=text, labels=(*labels, *metric.labels))
    return found
