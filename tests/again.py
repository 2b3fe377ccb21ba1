"""After a failed `make test`: the tests that failed, once more, alone on the machine.

A test that needs its turn in time can miss it where two test processes and a dozen engines share two cores; such a test
passes here, and its name is printed.  What is broken fails again.  Tests of losslessness get no second try, and many
failures are no accident: then nothing is run.  The exit status is that of the second try.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
"""Failures that may be accidents of one run."""
FAILED = "outrider/failed"
"""Where pytest's cache has the failures of the latest run."""


def main() -> int:
    cached = Path(__file__).parents[1] / ".pytest_cache" / "v" / FAILED
    failed = json.loads(cached.read_text()) if cached.exists() else []
    if not 0 < len(failed) <= MOST or any("::" not in each or each.startswith("tests/lossless/") for each in failed):
        return 1
    print(f"\nonce more, alone: {', '.join(failed)}", flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", "-m", "", *failed]).returncode
    if status == 0:
        print(f"passed at the second try, so mind their timing: {', '.join(failed)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
