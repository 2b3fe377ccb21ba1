"""The drafter's side of learning: runs the trainer's process, and decides which head drafts.

A thread of the drafter's process.  It puts a published head in place, and takes it back if live acceptance falls.  A trainer
that fails is started again; drafting goes on meanwhile, and only training time is lost.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import IO, Any

import msgspec
from torch import Tensor

from backend.config.settings import DraftingSettings
from backend.drafter.lessons import Lessons
from backend.fleet.stats import Learning
from backend.learning.ring import ReplayRing, ReplayWriter
from backend.learning.rules import Watch
from backend.learning.trainer import VERSIONS, Followed, Job, News, TakenBack, newest_version
from backend.models.head_config import CheckpointError
from backend.models.writing import save_tensors

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
RESTART_S, LONGEST_RESTART_S = 10.0, 600.0
"""Pause before a trainer that has ended is started again.  It doubles until a trainer reports something."""
JOIN_S = 5.0
SHARED_MEMORY = Path("/dev/shm")
KEPT_VERSIONS = 4
RING_BYTES = 256 << 20
"""Size of the replay ring."""
RING_ROWS = 32768
"""Rows that it has room for, however wide they are: twice the eight held-out sequences of a comparison fit into half of it."""


class Learner:
    """Learning of one drafter.  `swap` puts a head in place, or raises."""

    def __init__(
        self, directory: Path, target_dir: str, start_dir: str, settings: DraftingSettings, swap: Callable[[str], None]
    ) -> None:
        """`directory` is this drafter's own; `start_dir` the head it begins with if it has learned none yet.

        Raises `CheckpointError` when another drafter uses the directory.
        """
        # Resolved, as `start_dir` is, which may be a version in here.
        directory = directory.resolve()
        self._directory, self._target_dir, self._start_dir = directory, target_dir, start_dir
        self._swap = swap
        self._lock = _lock(directory)
        version, newest = newest_version(directory / VERSIONS)
        self._progress = Learning(version)
        self.head_dir = newest or start_dir
        """Directory of the present head."""
        self._previous_dir = start_dir
        """Directory of the latest earlier head whose acceptance is known."""
        self._newer = ""
        """File of target tensors that replace those in the target's directory; empty: none."""
        self._ring_dir = ring_of(directory)
        self._device = "cpu"
        self._trains = settings.learning != "on" or version > 0
        """A head that the user gave is trained from when its acceptance is low or has fallen."""
        self._watch = Watch()
        self._writer = ReplayWriter(ReplayRing(self._ring_dir, RING_BYTES, RING_ROWS))
        self.lessons = Lessons(self._writer, self._watch)
        """For the drafting thread."""
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._before: News | None = None
        """The present trainer's last report."""
        self._trainer: subprocess.Popen[bytes] | None = None
        self._restart_s, self._start_at = RESTART_S, 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    def start(self, device: str) -> None:
        self._device = device
        self._thread.start()

    def stop(self) -> None:
        """Ends the trainer."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._end_trainer()
        self._writer.stop()
        shutil.rmtree(self._ring_dir, ignore_errors=True)
        self._lock.close()

    def follow(self, newer: Mapping[str, Tensor]) -> None:
        """Has the trainer go on with these new tensors of the target.  Any thread."""
        try:
            path = self._directory / "target.safetensors"
            part = path.with_suffix(".part")
            save_tensors({name: tensor.contiguous() for name, tensor in newer.items()}, part)
            part.replace(path)
        except OSError as error:
            logger.warning("the head is taught by the target's earlier weights: %s", error)
            return
        self._newer = str(path)
        self._tell(Followed(self._newer))

    def stats(self) -> Learning:
        """What was learned so far, as counters."""
        return msgspec.structs.replace(
            self._progress,
            sequences=self._writer.written,
            sequences_dropped=self._writer.dropped,
            live_acceptance=self._watch.acceptance,
            previous_version=self._number(self._previous_dir),
            previous_acceptance=mean(before) if (before := self._watch.before) else None,
        )

    def _note(self, **changes: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **changes)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._trains and self._watch.needs_learning:
                logger.info("%.0f %% of its drafts are right at first: the head learns", 100 * (self._watch.acceptance or 0))
                self._trains = True
            if self._trains and self._trainer is None and time.monotonic() >= self._start_at:
                self._start_trainer()
            with contextlib.suppress(queue.Empty):
                self._hear(self._news.get(timeout=LOOK_EVERY_S))
            if self._watch.has_fallen and self._progress.version:
                self._take_back()

    def _hear(self, news: News | None) -> None:
        if news is None:
            self._end_trainer()
            logger.warning("the trainer has ended; it is started again in %d s", self._restart_s)
            self._start_at = time.monotonic() + self._restart_s
            self._restart_s = min(2 * self._restart_s, LONGEST_RESTART_S)
            return
        self._restart_s = RESTART_S
        # A trainer's first report counts what earlier ones did, too.
        before, self._before = self._before or news, news
        known = self._progress
        self._note(
            steps=news.steps,
            training_s=news.seconds,
            new_steps=known.new_steps + max(0, news.steps - before.steps),
            new_training_s=known.new_training_s + max(0.0, news.seconds - before.seconds),
            owed=news.owed,
            loss=news.loss,
            # Most reports have no comparison: keep the latest one.
            present_length=news.present or known.present_length,
            candidate_length=news.candidate or known.candidate_length,
        )
        if news.published:
            self._take(news.published)

    def _take(self, head_dir: str) -> None:
        before = self.head_dir
        if not self._put(head_dir, "a new head is not used"):
            self._tell(TakenBack(before))
            shutil.rmtree(head_dir, ignore_errors=True)
            return
        if self._watch.knows_previous:
            self._previous_dir = before
        self._note(published=self._progress.published + 1)
        logger.info("drafting with version %d", self._progress.version)
        self._prune()

    def _take_back(self) -> None:
        bad, good, before = self.head_dir, self._previous_dir, self._watch.before
        if bad == good or not self._put(good, f"{bad} cannot be taken back"):
            return
        # The next version is compared with the good one, too.
        self._watch.before = before
        self._note(taken_back=self._progress.taken_back + 1)
        logger.warning("its drafts are accepted less: %s is taken back, version %d drafts again", bad, self._progress.version)
        self._tell(TakenBack(good))
        shutil.rmtree(bad, ignore_errors=True)

    def _put(self, head_dir: str, complaint: str) -> bool:
        try:
            self._swap(head_dir)
        except Exception as error:
            logger.warning("%s: %r", complaint, error)
            return False
        self.head_dir = head_dir
        self._note(version=self._number(head_dir))
        return True

    def _number(self, head_dir: str) -> int:
        return int(Path(head_dir).name) if head_dir != self._start_dir else 0

    def _prune(self) -> None:
        # The head of the start is read again by every process that starts.
        kept = {self.head_dir, self._previous_dir, self._start_dir}
        versions = sorted((self._directory / VERSIONS).glob("[0-9]*"), reverse=True)
        for path in versions[KEPT_VERSIONS:]:
            if str(path) not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _tell(self, order: TakenBack | Followed) -> None:
        trainer = self._trainer
        if trainer is not None and trainer.stdin is not None:
            # It may have ended, or its pipe was just closed.  The next trainer starts from the state of then.
            with contextlib.suppress(OSError, ValueError):
                trainer.stdin.write(msgspec.json.encode(order) + b"\n")
                trainer.stdin.flush()

    def _start_trainer(self) -> None:
        job = Job(self._target_dir, self.head_dir, str(self._directory), str(self._ring_dir), self._device, self._newer)
        command = [sys.executable, "-m", "backend.learning.trainer", msgspec.json.encode(job).decode()]
        self._before = None
        try:
            self._trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            logger.warning("the trainer cannot be started: %s", error)
            self._news.put(None)
            return
        assert self._trainer.stdout is not None
        threading.Thread(target=self._read, args=(self._trainer.stdout,), name="trainer-news", daemon=True).start()

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            try:
                self._news.put(msgspec.json.decode(line, type=News))
            except msgspec.MsgspecError:
                logger.warning("the trainer says what is no news")
        self._news.put(None)

    def _end_trainer(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        # Leaving the block closes the pipes.  Orders that are still buffered cannot be written any more.
        with contextlib.suppress(OSError), trainer:
            trainer.kill()
            trainer.wait()


def _lock(directory: Path) -> IO[str]:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (directory / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise CheckpointError(f"{directory}: another drafter learns there; give drafting.learning_dir") from error
    return lock


def ring_of(directory: Path) -> Path:
    """The replay ring of a learner's directory: in shared memory, found again after a crash, and private to this user."""
    # Containers may share this memory, and have other directories at one path.
    place = f"{directory.resolve()} {directory.stat().st_ino}"
    name = f"outrider-ring-{os.getuid()}-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
    return SHARED_MEMORY / name if os.access(SHARED_MEMORY, os.W_OK) else directory / "ring"
