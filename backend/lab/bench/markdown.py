"""Tables in Markdown and the figures in them.  Pure."""

from collections.abc import Sequence
from statistics import median

NOTHING = "-"


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with the least and the greatest value if these differ."""
    if not values:
        return NOTHING
    middle, least, greatest = (number(each(values), digits) for each in (median, min, max))
    return middle if least == greatest else f"{middle} ({least}-{greatest})"
