"""Today's client libraries against a fleet of the demo model: `make clients`.

LangChain and LiteLLM run in a virtual environment of their own, the libraries for Node in a `node_modules` of their own; both
are made here, with the exact versions of `requirements.txt` and `package-lock.json`.  Arguments are passed on to pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.fleet_process import ROOT, ServedFleet

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv"
PYTHON = VENV / "bin" / "python"


def main(arguments: list[str]) -> int:
    install()
    with tempfile.TemporaryDirectory() as state_dir:
        fleet = ServedFleet("--mode", "sync", "--ray-namespace", f"clients-{os.getpid()}", "--gateway-state-dir", state_dir)
        try:
            return _run(fleet.url, arguments)
        finally:
            fleet.stop()


def install() -> None:
    """Both environments, unless they are there."""
    _install("requirements.txt", VENV, _make_venv)
    _install("package-lock.json", HERE / "node_modules", _make_node_modules)


def _run(url: str, arguments: list[str]) -> int:
    """All rows; the greater exit status of Python's and Node's."""
    environment = os.environ | {"OUTRIDER_URL": url, "PYTHONPATH": str(ROOT)}
    pytest = [str(PYTHON), "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "--confcutdir", ".", *arguments, "python"]
    rows = sorted(str(path) for path in (HERE / "node").glob("*.test.mjs"))
    node = ["node", "--test", "--test-concurrency=1", "--test-reporter=spec", *rows]
    done = [subprocess.run(each, cwd=HERE, env=environment, check=False).returncode for each in (pytest, node)]
    return max(abs(status) for status in done)


def _install(lock: str, made: Path, make: Callable[[], None]) -> None:
    """Makes a directory anew unless it was made from this very lock file."""
    wanted, stamp = (HERE / lock).read_text(), made / ".made-from"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing what {lock} names", flush=True)
    make()
    stamp.write_text(wanted)


def _make_venv() -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    subprocess.run(
        [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(HERE / "requirements.txt")], check=True
    )


def _make_node_modules() -> None:
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=HERE, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
