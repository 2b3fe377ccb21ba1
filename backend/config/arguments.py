"""Argument checks that several commands with options of their own share.  Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """An `argparse` type: whole numbers of `least` or more; the error for a smaller one names the limit."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: {least} is the least")
        return value

    return read
