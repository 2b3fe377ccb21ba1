"""`outrider bench`: reads its options, measures, and writes what was found, also when it is interrupted.  Parent process."""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend.config import environment
from backend.lab.bench import options as options_module
from backend.lab.bench.children import ENVIRONMENT, ChildError
from backend.lab.bench.options import Options
from backend.lab.bench.plan import CoreSplit, split_cores
from backend.models.head_config import CheckpointError
from backend.models.resolve import ModelError, Say

RESULTS = Path("benchmarks") / "results"


class BenchError(Exception):
    """The benchmark cannot go on; the message is for a person."""


def main(arguments: Sequence[str], say: Say) -> None:
    """Runs one benchmark; `say` gets lines of progress.  Raises `BenchError`."""
    options = options_module.parse(arguments)
    try:
        split = split_cores(sorted(os.sched_getaffinity(0)), options.verifier_cores, options.drafter_cores)
    except ValueError as error:
        raise BenchError(str(error)) from error
    # Imported here: vLLM's codec and torch take seconds, and help must not.
    environment.export(ENVIRONMENT, override=False)
    from backend.lab.bench import hardware
    from backend.lab.bench.widen import WidenError

    if options.pace and hardware.gpus():
        raise BenchError("--pace is for a CPU; on a GPU steps take what they take")
    now = datetime.datetime.now(datetime.UTC)
    about: dict[str, Any] = {
        "commit": hardware.commit(),
        "hardware": hardware.describe(split.all),
        "command": shlex.join(["outrider", "bench", *arguments]),
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    output = options.output or RESULTS / f"{now:%Y-%m-%d}-{about['commit'].rstrip('+')}"
    output.mkdir(parents=True, exist_ok=True)
    try:
        (_micro if options.micro else _profile if options.profile else _modes)(options, split, about, output, say)
    except (ChildError, CheckpointError, ModelError, WidenError, TimeoutError, OSError) as error:
        raise BenchError(str(error)) from error


def _modes(options: Options, split: CoreSplit, about: dict[str, Any], output: Path, say: Say) -> None:
    from backend.engine.client import EngineRefused
    from backend.lab.bench import tables
    from backend.lab.bench.load import LoadError
    from backend.lab.bench.run import Results, run

    results = Results()

    def keep() -> None:
        tables.keep(output, about, options, split, results)

    try:
        run(options, split, results, say, keep)
    except (EngineRefused, LoadError) as error:
        raise BenchError(str(error)) from error
    finally:
        # What was measured before an interruption is worth a table too; it is marked as incomplete.
        if results.samples:
            tables.write(output, about, options, split, results, say)


def _micro(options: Options, split: CoreSplit, about: dict[str, Any], output: Path, say: Say) -> None:
    from backend.lab.bench import micro

    micro.run(options, split, about, output, say)


def _profile(options: Options, split: CoreSplit, about: dict[str, Any], output: Path, say: Say) -> None:
    from backend.engine.client import EngineRefused
    from backend.lab.bench import profile, run
    from backend.lab.bench.load import LoadError

    try:
        profile.write(about, run.profile(options, split, say), output, say)
    except (EngineRefused, LoadError) as error:
        raise BenchError(str(error)) from error
