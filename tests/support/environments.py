"""Environments of their own for programs whose packages do not fit beside ours.  Tests only."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def python_environment(requirements: Path) -> Path:
    """The Python of a virtual environment beside `requirements` that has exactly the packages named there."""
    environment = requirements.parent / ".venv"
    python = environment / "bin" / "python"

    def make() -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(requirements)], check=True)

    made_from(requirements, environment, make)
    return python


def made_from(lock: Path, made: Path, make: Callable[[], None]) -> None:
    """Makes a directory anew unless it was made from this very lock file."""
    wanted, stamp = lock.read_text(), made / ".made-from"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing what {lock.name} names", flush=True)
    make()
    stamp.write_text(wanted)
