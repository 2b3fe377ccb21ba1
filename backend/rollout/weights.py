"""Which weights of the target a trainer has left for the next round of a rollout.  The command's process."""

from __future__ import annotations

import re
from pathlib import Path

from backend.models.head_config import CheckpointError
from backend.models.tensor_files import TensorFiles

LATEST = "latest"
_STEP = re.compile(r"step[-_]?(\d+)")


class WeightsError(Exception):
    """There is no checkpoint where there should be one; the message is one line."""


def newest(directory: Path) -> Path | None:
    """The checkpoint that the file `latest` names, else that of the highest N among `step-N`; None while there is neither.

    Raises `WeightsError`.
    """
    directory = directory.absolute()  # Verifiers stand elsewhere.
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
    """Raises `WeightsError` unless the newest checkpoint, where there is one already, has the target's tensors."""
    # Imported here: vLLM takes seconds.
    from backend.engine.weights import check_same_shapes

    found = newest(directory)
    if found is None:
        return
    try:
        files = TensorFiles(target_dir)
        check_same_shapes(str(found), {name: tuple(files.shape(name) or ()) for name in files.tensors})
    except (CheckpointError, OSError, ValueError) as error:
        raise WeightsError(f"{found}: {error}") from error
