"""The command line of `python -m loadtest`: makes `Options` of arguments, or raises an error of one line."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from loadtest import slo
from loadtest.scenarios import SCENARIOS, Scenario
from loadtest.workloads import Knobs


class OptionsError(ValueError):
    """The arguments cannot be used; the message is one line."""


@dataclass(frozen=True)
class Options:
    """The options of one call."""

    scenario: str
    users: int
    knobs: Knobs
    """If the model's name is empty, the first model that is served."""
    host: str | None
    api_key: str | None
    timeout_s: float
    drain_s: float
    slo: dict[str, float]
    results: Path
    serve: tuple[str, ...]
    """Settings for the `outrider serve` that is started."""

    @property
    def kind(self) -> Scenario:
        return SCENARIOS[self.scenario]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionsError(message)


def parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<14}{each.summary}" for name, each in SCENARIOS.items())
    figures = textwrap.fill(", ".join(slo.names()), 96, initial_indent="  ", subsequent_indent="  ")
    result = _Parser(
        prog="python -m loadtest",
        description="Loads a gateway and judges what its clients see.  Without --host it starts `outrider serve` and ends it.",
        epilog=f"scenarios:\n{names}\n\nfigures for --slo (p50 stands for the median):\n{figures}\n\n"
        "Settings behind `--` go to `outrider serve`: python -m loadtest --scenario chat -- --mode sync",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("--scenario", default="chat", choices=sorted(SCENARIOS), metavar="NAME", help="see below [chat]")
    add("--users", type=_positive(int), metavar="N", help="users at once, or at the peak [the scenario's own]")
    add("--duration", type=_positive(float), metavar="S", help="seconds of load [the scenario's own]")
    add("--prompt-tokens", type=_positive(int), default=128, metavar="N", help="length of prompts, roughly [128]")
    add("--max-tokens", type=_positive(int), default=64, metavar="N", help="longest answer [64]")
    add("--temperature", type=float, default=0.0, metavar="X", help="sampling temperature [0]")
    add("--seed", type=int, default=0, metavar="N", help="the same seed asks the same [0]")
    add("--host", metavar="URL", help="a gateway that runs already, such as http://127.0.0.1:8000")
    add("--model", metavar="NAME", default="", help="model to ask for [the first that is served]")
    add("--api-key", metavar="KEY", help="key of the gateway [$OPENAI_API_KEY]")
    add("--timeout", type=_positive(float), default=120.0, metavar="S", help="longest silence of a connection [120]")
    add("--drain", type=_positive(float), default=30.0, metavar="S", help="time for open requests at the end [30]")
    add("--slo", default="", metavar="LIMITS", help="name=limit,... or a YAML file; on top of the defaults")
    add("--no-default-slo", action="store_true", help="only the limits given with --slo")
    add("--results", type=Path, metavar="DIR", help="where reports go [loadtest/results/SCENARIO-TIME]")
    return result


def parse(arguments: Sequence[str], environment_key: str | None, stamp: str) -> Options:
    """Parses the command line; `stamp` is part of the default results directory's name.  Raises `OptionsError`."""
    ours, serve = split(arguments)
    given = parser().parse_args(ours)
    kind = SCENARIOS[given.scenario]
    host = given.host.rstrip("/") if given.host else None
    if host and not host.startswith(("http://", "https://")):
        raise OptionsError(f"--host {host}: expected a URL such as http://127.0.0.1:8000")
    if host and serve:
        raise OptionsError("settings behind -- are for a fleet started here; with --host there is none")
    if host and (kind.kills_drafter or kind.compares):
        raise OptionsError(f"{given.scenario} works on fleets that it starts itself: leave out --host")
    limits = {} if given.no_default_slo else {**slo.DEFAULT, **kind.slo}
    if host:
        # Requests that are left in that gateway at the end may belong to other clients.
        limits.pop("leftover", None)
    return Options(
        scenario=given.scenario,
        users=given.users or kind.users,
        knobs=Knobs(
            given.model, given.prompt_tokens, given.max_tokens, given.temperature, given.seed, given.duration or kind.duration_s
        ),
        host=host,
        api_key=given.api_key or environment_key,
        timeout_s=given.timeout,
        drain_s=given.drain,
        slo={**limits, **read_slo(given.slo)},
        results=given.results or Path("loadtest/results") / f"{given.scenario}-{stamp}",
        serve=tuple(serve),
    )


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into those before `--` and those after it."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def read_slo(text: str) -> dict[str, float]:
    """Limits as written on the command line, or in the YAML file named there.  Raises `OptionsError`."""
    try:
        if not text.endswith((".yaml", ".yml")):
            return slo.parse(text)
        tree = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise slo.SloError("expected a mapping of figures to limits")
        return slo.check(tree)
    except OSError as error:
        raise OptionsError(f"--slo {text}: {error.strerror}") from error
    except (slo.SloError, yaml.YAMLError) as error:
        raise OptionsError(f"--slo: {' '.join(str(error).split())}") from error


def _positive(kind: type[int] | type[float]) -> type[int] | type[float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = kind.__name__
    return convert  # type: ignore[return-value]
