"""Sequences that live traffic left for a drafter to learn from: one file each, in a directory of bounded size.

The drafter's writer thread writes, its trainer's process reads.  A file appears whole or not at all, so that either may be
killed at any time.  Names are ascending numbers; the oldest files go first.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
WAITING = 16
"""Sequences that may wait to be written; further ones are dropped."""
HELD_OUT = 10
"""Every so many-th sequence is never trained on: heads are compared by these."""


@dataclass(frozen=True)
class Replay:
    """A part of one sequence, with the target's features.

    `tokens` `[n]` int32 are all from position `first` on; `features` `[rows, width]` are those of positions `first`, `first +
    1`, ..., in the type the target computed them in.  Tokens from position `prompt` on are the target's own, sampled at
    `temperature` (0: greedily).
    """

    tokens: Tensor
    features: Tensor
    first: int
    prompt: int
    temperature: float


def is_held_out(number: int) -> bool:
    """Whether file `number` is for comparing heads."""
    return number % HELD_OUT == 0


class ReplayRing:
    """The directory.  One writer; readers look at `numbers` and `read`."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        # What clients said lies here.
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def numbers(self) -> list[int]:
        """Files there are, oldest first."""
        return sorted(int(path.stem) for path in self._directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())

    def open_for_writing(self) -> int:
        """Removes what a killed writer left half done; the number of the next file."""
        for path in self._directory.glob("*.part"):
            path.unlink(missing_ok=True)
        return max(self.numbers(), default=0) + 1

    def write(self, number: int, replay: Replay) -> None:
        """Adds a file and removes the oldest beyond the bound.  Raises `OSError`."""
        part = self._directory / f"{number}.part"
        said = {"first": str(replay.first), "prompt": str(replay.prompt), "temperature": repr(replay.temperature)}
        try:
            save_file({"tokens": replay.tokens, "features": replay.features}, part, metadata=said)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        part.replace(self._path(number))
        sizes = [(each, self._path(each).stat().st_size) for each in self.numbers()]
        excess = sum(size for _, size in sizes) - self._max_bytes
        for each, size in sizes:
            if excess <= 0:
                break
            self._path(each).unlink(missing_ok=True)
            excess -= size

    def read(self, number: int) -> Replay | None:
        """A file's content; None when it is gone or no such file."""
        try:
            with safe_open(self._path(number), framework="pt") as file:
                said = file.metadata()
                tokens, features = file.get_tensor("tokens"), file.get_tensor("features")
            return Replay(tokens, features, int(said["first"]), int(said["prompt"]), float(said["temperature"]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{SUFFIX}"


class ReplayWriter:
    """Writes on a thread of its own, so that drafting never waits for a file system."""

    def __init__(self, ring: ReplayRing) -> None:
        self._ring = ring
        self._queue: queue.Queue[Replay | None] = queue.Queue(WAITING)
        self.written = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="replay-writer", daemon=True)
        self._thread.start()

    def put(self, replay: Replay) -> None:
        """Takes a sequence, or drops it where too many wait."""
        try:
            self._queue.put_nowait(replay)
        except queue.Full:
            self.dropped += 1

    def stop(self) -> None:
        """Writes what waits and ends."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        number = self._ring.open_for_writing()
        while (replay := self._queue.get()) is not None:
            try:
                self._ring.write(number, replay)
            except OSError as error:
                self.dropped += 1
                logger.warning("a sequence to learn from could not be written: %s", error)
                continue
            number += 1
            self.written += 1
