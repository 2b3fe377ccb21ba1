"""The options of `outrider bench`.  Pure."""

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from backend.config.settings import Mode
from backend.config.sources import at_least
from backend.lab.bench.pace import PROFILES, parse_pace

PROBABILISTIC = "native-probabilistic"
"""Mode `native` with draft tokens sampled from the head's distribution, and rejection sampling with both distributions."""
MODES: tuple[str, ...] = ("off", "native", PROBABILISTIC, *(mode for mode in get_args(Mode) if mode not in ("off", "native")))
"""The modes of the settings, and a variant of `native` to compare with."""
TARGETS = ("demo", "S", "L")
Number = TypeVar("Number", int, float)

AUTO_LEARNS = 4
"""Factor on the number of warm-up loads for `auto`, which learns there what its plans cost, as a server does in its first
minute."""
WARM_UP_TOKENS = 64
OWN = "own"
"""The name of a target given with --model."""
USUAL = {"targets": TARGETS, "concurrency": (1, 4, 16), "tokens": 128, "requests": 4, "waves": 3}
QUICK = {"targets": ("S",), "concurrency": (1, 4), "tokens": 64, "requests": 2, "waves": 1}
"""Default options, without `--quick` (`USUAL`) and with it (`QUICK`)."""


def parse(arguments: Sequence[str]) -> Namespace:
    """Reads the command line; wrong options end the program with a message and status 2."""
    parser = _parser()
    given = parser.parse_args(list(arguments))
    if given.drafter and not given.model:
        parser.error("--drafter goes with --model")
    if given.model and given.targets:
        parser.error("--model is measured alone: --targets are made of the built-in demo")
    if given.model and not given.drafter:
        parser.error("--model needs --drafter: an EAGLE head made for it, or ngram")
    values = vars(given)
    usual = QUICK if values.pop("quick") else USUAL
    values |= {name: value for name, value in usual.items() if values[name] is None}
    if given.model:
        given.targets = (OWN,)
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="outrider bench",
        description="Measures every mode on the same cores, in alternating rounds, and writes bench.json, .md and .png.",
    )
    say = parser.add_argument
    say("--output", type=Path, metavar="DIR", help="where to write (default: benchmarks/results/DATE-COMMIT)")
    say("--quick", action="store_true", help="one target and fewer points: under ten minutes on two cores")
    paced = f"let steps last as long as an accelerator's: {', '.join(PROFILES)}, or MS,US per target step and token"
    say("--pace", type=parse_pace, metavar="PACE", help=f"{paced}[, draft pass and token[, in mode native]]")
    say("--targets", type=_names(TARGETS), metavar="LIST", help=f"of {', '.join(TARGETS)} (default: all)")
    say("--modes", type=_names(MODES), metavar="LIST", default=MODES, help=f"of {', '.join(MODES)} (default: all)")
    say(
        "--k", dest="ks", type=_numbers(int, 1), metavar="LIST", default=(4,), help="draft tokens per verification (default: 4)"
    )
    say("--concurrency", type=_numbers(int, 1), metavar="LIST", help="requests in flight (default: 1,4,16)")
    say("--temperatures", type=_numbers(float, 0), metavar="LIST", default=(0.0, 1.0), help="default: 0,1")
    say("--tokens", type=at_least(2), metavar="N", help="tokens of every answer (default: 128)")
    say("--prompt-tokens", type=at_least(8), metavar="N", default=128, help="tokens of every prompt (default: 128)")
    say("--rounds", type=at_least(1), metavar="N", default=3, help="measurements of each point (default: 3)")
    say("--requests", type=at_least(1), metavar="N", help="requests per measurement at least (default: 4)")
    say("--waves", type=at_least(1), metavar="N", help="and at least N times as many as are in flight (default: 3)")
    before = f"loads of each kind before the first measured one, {AUTO_LEARNS} times as many for auto (default: 3)"
    say("--warm-ups", type=at_least(1), metavar="N", default=3, help=before)
    say("--model", metavar="NAME", help="measure this target instead: Hugging Face id or directory")
    say("--drafter", metavar="NAME", help="its EAGLE head: Hugging Face id or directory, or ngram")
    return parser


def _names(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        wanted = [part.strip() for part in text.split(",") if part.strip()]
        unknown = [name for name in wanted if name not in allowed]
        if unknown or not wanted:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'}: there are {', '.join(allowed)}")
        return tuple(name for name in allowed if name in wanted)

    return read


def _numbers(kind: Callable[[str], Number], least: int) -> Callable[[str], tuple[Number, ...]]:
    def read(text: str) -> tuple[Number, ...]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from error
        if any(value < least for value in values):
            raise argparse.ArgumentTypeError(f"{text!r}: {least} is the least")
        return tuple(sorted(set(values)))

    return read
