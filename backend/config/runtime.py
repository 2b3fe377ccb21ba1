"""This user's private directory for the small files of running programs: sockets, tokens, where fleets are.  Any process."""

import contextlib
import errno
import os
import secrets
import socket
import stat
from pathlib import Path

from backend.config import environment
from backend.config.sources import CommandError


class StateError(CommandError):
    """The runtime directory cannot be trusted, or no fleet matches; the message is one line."""


def home() -> Path:
    """This user's private runtime directory, created when missing.  Raises `StateError` when others may enter it."""
    directory = environment.runtime_home()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise StateError(f"{directory}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateError(f"{directory}: must be a directory of yours that nobody else may enter (mode 0700)")
    return directory


def member_socket() -> str:
    """A new ipc address at which a member of a joined cluster serves processes of its own node.

    Also removes sockets that no process listens on any more: members that were killed left them.
    """
    for socket_file in home().glob("m-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(socket_file)) == errno.ECONNREFUSED:
                socket_file.unlink(missing_ok=True)
    return f"ipc://{home()}/m-{secrets.token_hex(6)}.sock"
