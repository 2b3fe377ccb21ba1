"""The process environment: the one module that reads or writes `os.environ`.  Any process."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

PREFIX = "OUTRIDER_"
READY_FILE = PREFIX + "READY_FILE"
"""Variable that names a file: a fleet writes its URL there when it serves.  `outrider.Fleet` sets it."""


def outrider_variables() -> dict[str, str]:
    """The environment variables that may hold settings."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX) and name != READY_FILE}


def ready_file() -> Path | None:
    return Path(os.environ[READY_FILE]) if READY_FILE in os.environ else None


def drop_outrider_variables() -> None:
    """Takes settings out of the environment, which child processes inherit."""
    for name in outrider_variables():
        del os.environ[name]


def python_path_with(directory: Path) -> str:
    """PYTHONPATH for child processes, with `directory` in front."""
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(directory), *(part for part in inherited.split(os.pathsep) if part)])


def huggingface_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def runtime_home() -> Path:
    """Where this user's running programs keep small files: `XDG_RUNTIME_DIR`, else a private name under the temp directory."""
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if xdg and Path(xdg).is_dir() and os.access(xdg, os.W_OK):
        return Path(xdg) / "outrider"
    return Path(tempfile.gettempdir()) / f"outrider-{os.getuid()}"


def state_dir() -> Path:
    """Where this user's programs keep files that outlive them (XDG base directories)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "outrider"


def export(variables: Mapping[str, str], *, override: bool = True) -> None:
    """Sets variables for this process and its children; without `override`, variables that are already set stay."""
    for name, value in variables.items():
        if override or name not in os.environ:
            os.environ[name] = value


def users_choice(defaults: Mapping[str, str]) -> dict[str, str]:
    """`defaults`, each replaced by the user's environment variable of that name if it is set."""
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
