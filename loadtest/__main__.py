"""`python -m loadtest`.  Exit status: 0 all objectives met, 1 some missed or the run failed, 2 wrong arguments, 130 Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from loadtest import report
from loadtest.options import OptionsError, parse
from loadtest.run import LoadError, run
from loadtest.served import FleetError


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        options = parse(arguments, os.environ.get("OPENAI_API_KEY"), time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
        result = run(options, shlex.join(["python", "-m", "loadtest", *without_key(arguments)]), _say)
    except OptionsError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    except (FleetError, LoadError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\n{report.text(result)}\nreports in {options.results}")
    return 1 if result.missed else 0


def without_key(arguments: Sequence[str]) -> list[str]:
    """The arguments without the values of API keys, for reports."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1].endswith("-api-key"):
            argument = "***"
        elif "-api-key=" in argument:
            argument = argument.partition("=")[0] + "=***"
        shown.append(argument)
    return shown


def _say(line: str) -> None:
    print(line, flush=True)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
