"""Schemathesis calls a fleet of the demo model with what `/openapi.json` allows, and with what it does not: `make fuzz`.

It runs for `--seconds` in an environment of its own.  The exit status is 1 for a 5xx, or for a status or a shape that the
document does not name.  Operations that change the fleet are left out: a paused or sleeping fleet would answer nothing else.
Other arguments go to `schemathesis run` (`--include-path /v1/files`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gateway.auth.rights import Right
from tests.support.environments import python_environment
from tests.support.fleet_process import ServedFleet
from tests.support.rights import ROUTES, paths

HERE = Path(__file__).resolve().parent
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=1200, help="time for all requests (default: 1200)")
    options, others = parser.parse_known_args(arguments)
    python = python_environment(HERE / "requirements.txt")
    settings = ("--mode", "sync", "--ray-namespace", f"fuzz-{os.getpid()}", "--gateway-state-dir")
    with tempfile.TemporaryDirectory() as folder, ServedFleet(*settings, folder) as fleet:
        command = [str(python), "-m", "schemathesis.cli", "run", f"{fleet.url}/openapi.json"]
        # An answer without `max_tokens` is as long as the model's context.
        command += ["--max-time", str(options.seconds), "--request-timeout", "60", "--checks", CHECKS]
        command += ["--continue-on-failure"]
        command += [*(word for path in sorted(paths(ROUTES, Right.ADMINISTER)) for word in ("--exclude-path", path))]
        return subprocess.run([*command, *others], cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
