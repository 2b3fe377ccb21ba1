"""Today's client libraries against a fleet of the demo model: `make clients`.

LangChain and LiteLLM run in a virtual environment of their own, the libraries for Node in a `node_modules` of their own; both
are made here, with the exact versions of `requirements.txt` and `package-lock.json`.  Arguments are passed on to pytest.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.environments import made_from, python_environment
from tests.support.fleet_process import ROOT, ServedFleet

HERE = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    python = install()
    settings = ("--mode", "sync", "--ray-namespace", f"clients-{os.getpid()}", "--gateway-state-dir")
    with tempfile.TemporaryDirectory() as state_dir, ServedFleet(*settings, state_dir) as fleet:
        return _run(python, fleet.url, arguments)


def install() -> Path:
    """Makes both environments unless they are there; the Python of the first."""
    made_from(HERE / "package-lock.json", HERE / "node_modules", _make_node_modules)
    return python_environment(HERE / "requirements.txt")


def _run(python: Path, url: str, arguments: list[str]) -> int:
    """All rows; the greater exit status of Python's and Node's."""
    environment = os.environ | {"OUTRIDER_URL": url, "PYTHONPATH": str(ROOT)}
    pytest = [str(python), "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "--confcutdir", ".", *arguments, "python"]
    rows = sorted(str(path) for path in (HERE / "node").glob("*.test.mjs"))
    node = ["node", "--test", "--test-concurrency=1", "--test-reporter=spec", *rows]
    done = [subprocess.run(each, cwd=HERE, env=environment, check=False).returncode for each in (pytest, node)]
    return max(abs(status) for status in done)


def _make_node_modules() -> None:
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
