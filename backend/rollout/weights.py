"""Finds and checks the target's weights that a trainer has left for a rollout's next round.  The command's process."""

from __future__ import annotations

import re
from pathlib import Path

from backend.models.check import check_same_shapes, is_tied, shapes_of
from backend.models.head_config import CheckpointError

LATEST = "latest"
_STEP = re.compile(r"step[-_]?(\d+)")


class WeightsError(Exception):
    """A checkpoint is missing or cannot be used; the message is one line."""


def newest(directory: Path) -> Path | None:
    """The checkpoint that the file `latest` names, else the `step-N` with the highest N; None if there is neither.

    Raises `WeightsError`.
    """
    directory = directory.absolute()  # verifiers have other working directories
    try:
        named = directory / LATEST
        if named.is_file():
            found = directory / named.read_text(encoding="utf-8").strip()
            if found == directory or not found.is_dir():
                raise WeightsError(f"{named} names {found.name!r}, and there is no such directory")
            return found
        steps = [(int(step[1]), each) for each in directory.iterdir() if (step := _STEP.fullmatch(each.name)) and each.is_dir()]
    except (OSError, UnicodeError) as error:
        raise WeightsError(f"{directory}: {error.strerror if isinstance(error, OSError) else 'no text'}") from error
    return max(steps)[1] if steps else None


def check_weights(directory: Path, target_dir: str) -> None:
    """Raises `WeightsError` if the newest checkpoint, when there is one already, does not have the target's tensors."""
    found = newest(directory)
    if found is None:
        return
    try:
        check_same_shapes(str(found), shapes_of(target_dir), is_tied(target_dir))
    except (CheckpointError, OSError, ValueError) as error:
        raise WeightsError(f"{found}: {error}") from error
