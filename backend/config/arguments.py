"""What commands with options of their own check in the same way.  Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A reader of whole numbers that refuses smaller ones by name; for `argparse`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: {least} is the least")
        return value

    return read
