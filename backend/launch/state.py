"""The files of running fleets: directories for sockets, and a file by which commands find a fleet.  Launcher and commands.

Everything is below one directory that only this user may enter.  If a fleet's process was killed, its files stay; the next call
of `running` removes them.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from backend.config.runtime import StateError, home


class FleetFile(msgspec.Struct, frozen=True):
    """How to reach one running fleet."""

    pid: int
    namespace: str
    ray_address: str
    url: str
    """The gateway's base URL; empty until it serves."""
    directories: list[str]
    """Directories to remove when the process is gone."""
    owns_cluster: bool = True
    """False: the fleet joined a Ray cluster that others started, and our token is not valid there."""


def ray_token() -> str:
    """The authentication token of this user's own Ray clusters; created at first use.  Raises `StateError`."""
    path = home() / "ray-token"
    try:
        with path.open("a+") as file:
            # Of several processes, one writes a token, and all read it.  A crash may have left an empty file.
            fcntl.flock(file, fcntl.LOCK_EX)
            os.fchmod(file.fileno(), 0o600)
            file.seek(0)
            token = file.read()
            if not token:
                token = secrets.token_hex(32)
                file.write(token)
            return token
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error


def new_runtime_directory() -> Path:
    """A private directory with a short path, for one fleet's sockets."""
    return Path(tempfile.mkdtemp(prefix="f-", dir=home()))


def file_of(namespace: str, pid: int) -> Path:
    """The file of the fleet with that namespace, started by process `pid`."""
    return home() / f"fleet-{re.sub(r'[^A-Za-z0-9_.-]', '_', namespace)}-{pid}.json"


def write(fleet: FleetFile) -> Path:
    """Writes the file of a fleet, for other commands; a second call by the same process replaces it."""
    file = file_of(fleet.namespace, fleet.pid)
    partial = file.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(fleet))
    partial.chmod(0o600)
    partial.replace(file)
    return file


def running() -> list[FleetFile]:
    """The running fleets of this user on this host.  Removes the files of dead ones."""
    found = []
    for file in sorted(home().glob("fleet-*.json")):
        try:
            fleet = msgspec.json.decode(file.read_bytes(), type=FleetFile)
        except (msgspec.MsgspecError, UnicodeDecodeError, OSError):
            continue
        if Path(f"/proc/{fleet.pid}").exists():
            found.append(fleet)
        else:
            _bury(fleet)
            file.unlink(missing_ok=True)
    return found


def find(name: str | None, port: int | None = None) -> FleetFile:
    """The running fleet with that namespace or pid, or whose gateway has that port; else the only one.  Raises `StateError`."""
    fleets = running()
    matching = [f for f in fleets if name is None or name in (f.namespace, str(f.pid))]
    if name is None and port is not None:
        matching, name = [f for f in fleets if urlsplit(f.url).port == port], f"port {port}"
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(f"{f.namespace} (pid {f.pid})" for f in fleets)
    if not fleets:
        raise StateError("no fleet of yours runs on this host (start one with `outrider serve`, or give --ray-address)")
    if not matching:
        raise StateError(f"no fleet {name!r} runs on this host; there is {known}")
    raise StateError(f"several fleets run on this host, name one by namespace or pid: {known}")


def _bury(fleet: FleetFile) -> None:
    """Removes a dead fleet's directories, except those that do not look like ours."""
    for directory in map(Path, fleet.directories):
        with contextlib.suppress(OSError):
            if directory.name.startswith(("f-", "or-ray-")) and directory.lstat().st_uid == os.getuid():
                shutil.rmtree(directory, ignore_errors=True)
