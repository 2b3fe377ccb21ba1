"""The options of `outrider rollout` and `outrider trace make`, and the settings of a rollout's fleet.  Pure."""

import argparse
import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.config import Settings
from backend.config.sources import ALIASES, ConfigError, Loaded, Parser, at_least, flag, leaves, nearest

NEEDED_BY_FIXED = {"async_scheduling": False}
"""vLLM's engine arguments that fixed responses need (`backend.engine.worker.fixed.takes_fixed`)."""

DEFAULT_TOKENS = 1024
"""Longest free response in tokens, unless something else is asked for."""


def rollout_options(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The command's own options, and the arguments that are settings.  Raises `ConfigError`; `--help` ends the program.

    `sampling` has the sampling parameters of all prompts, `--temperature` and `--max-tokens` among them.
    """
    parser = _rollout_parser()
    given, settings = parser.parse_known_args(list(arguments))
    known = [*parser._option_string_actions, "--config", *ALIASES, *(flag(path) for path, _ in leaves())]
    for name in (argument.partition("=")[0] for argument in settings):
        if name.startswith("--") and name not in known:
            raise ConfigError(f"unknown flag {name}{nearest(name, known)}")
    if given.fixed and (given.samples > 1 or given.sampling):
        raise ConfigError("--fixed-responses says what is emitted: no --n and no --sampling beside it")
    if given.batch is None and given.rounds is not None and given.rounds > 1:
        raise ConfigError("--rounds counts parts of --batch rows each; the same rows again: --repeat")
    given.sampling = {"temperature": given.temperature, "max_tokens": given.max_tokens or DEFAULT_TOKENS} | given.sampling
    return given, settings


def slices(options: Namespace, rows: int) -> list[range]:
    """The rows of each part of the rollout.  Raises `ConfigError` when the trace has too few."""
    if options.offset >= rows:
        raise ConfigError(f"--offset {options.offset}: there are {rows} rows")
    batch = options.batch or rows - options.offset
    parts = [range(start, min(start + batch, rows)) for start in range(options.offset, rows, batch)]
    if options.rounds is not None and options.rounds > len(parts):
        raise ConfigError(f"--rounds {options.rounds}: {rows} rows from {options.offset} on are {len(parts)} parts of {batch}")
    return parts[: options.rounds]


def fleet_settings(options: Namespace, settings: Settings) -> Settings:
    """The settings of the rollout's own fleet."""
    if not options.fixed:
        return settings
    verifier = settings.verifier
    engine_args = verifier.engine_args | NEEDED_BY_FIXED
    return settings.model_copy(update={"verifier": verifier.model_copy(update={"engine_args": engine_args})})


def check_joined(loaded: Loaded) -> None:
    """Raises `ConfigError` for settings given beside `--join`."""
    for path, origin in loaded.origins.items():
        if path[0] != "ray":
            raise ConfigError(f"--join takes a fleet as it is: {origin} says otherwise")


def _rollout_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="outrider rollout",
        description="Runs a trace's prompts over a fleet of its own; writes a row of every step, request and verification.",
        epilog="All settings of `outrider serve` are flags here too (--verifiers, --drafters, --mode, --model, --drafter, "
        "--num-speculative-tokens, --config, ...; see `outrider serve --help`).",
        allow_abbrev=False,
    )
    say = parser.add_argument
    say("--trace", required=True, metavar="FILE", help="train.{S}.parquet with string columns prompt and gen")
    say("--prompts", type=Path, metavar="FILE", help="run only these (parquet or JSON Lines, prompt); all must be in the trace")
    say("--out", type=Path, required=True, metavar="DIR", help="where to write step{S}/round{R}/ and cases/train.{S}.parquet")
    say(
        "--join", nargs="?", const="", metavar="FLEET", help="use a running fleet (its namespace or pid; default: the only one)"
    )
    say("--fixed-responses", dest="fixed", action="store_true", help="emit exactly the trace's responses (teacher-forced)")
    say("--offset", type=at_least(0), default=0, metavar="N", help="skip so many rows (default: 0)")
    say("--batch", type=at_least(1), metavar="N", help="rows per round, each round the next ones (default: all of them)")
    say("--rounds", type=at_least(1), metavar="N", help="so many rounds (default: until the rows end)")
    say("--repeat", type=at_least(1), default=1, metavar="N", help="run each round's rows so often (default: 1)")
    say("--n", dest="samples", type=at_least(1), default=1, metavar="N", help="responses per prompt (default: 1)")
    say("--step", type=at_least(0), metavar="S", help="the training step (default: the S of the trace's name)")
    say("--max-tokens", type=at_least(1), metavar="N", help="longest response (default: 1024 for a free one)")
    say(
        "--sampling",
        type=_sampling,
        default={},
        metavar="JSON",
        help="sampling parameters of free responses, by vLLM's names, or @FILE with them; --prompts may have others in a row",
    )
    say("--temperature", type=float, default=1.0, metavar="X", help="of free responses (default: 1)")
    say("--seed", type=int, metavar="N", help="draw free responses from it (default: they differ from run to run)")
    return parser


def trace_options(arguments: Sequence[str]) -> Namespace:
    """Parses the arguments of `outrider trace make`.  Raises `ConfigError`; `--help` ends the program."""
    parser = Parser(
        prog="outrider trace make",
        description="Makes a trace for demonstrations: prompts and responses cut out of Python source code.",
        allow_abbrev=False,
    )
    say = parser.add_argument
    say("source", type=Path, metavar="DIR", help="a directory with Python files, or stdlib: Python's standard library")
    say("--out", type=Path, required=True, metavar="FILE", help="train.{S}.parquet to write")
    say("--model", default="demo", metavar="NAME", help="whose tokens lengths are counted in: directory or demo (default)")
    say("--limit", type=at_least(1), metavar="N", help="so many rows at most")
    say("--n", dest="samples", type=at_least(1), default=1, metavar="N", help="so many rows to a prompt (default: 1)")
    say("--max-prompt", type=at_least(16), default=256, metavar="N", help="longest prompt in tokens (default: 256)")
    say("--max-gen", type=at_least(16), default=512, metavar="N", help="longest response in tokens (default: 512)")
    say("--seed", type=int, default=0, metavar="N", help="of the cuts (default: 0)")
    return parser.parse_args(list(arguments))


def _sampling(text: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: no JSON object")
    return value
