"""Trains a drafter's head from the replay ring, compares it with the present head, and publishes it if it is better.

`python -m backend.learning.trainer JOB`, a child process of the drafter.  Its standard input has orders (`TakenBack`,
`Followed`), its standard output `News`, one JSON object per line.  It ends when its input closes.  It runs at idle priority,
and sleeps while the ring has nothing new.  A checkpoint lets it go on after a restart.
"""

import logging
import math
import os
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from torch import Tensor

from backend.config.logs import configure_logging
from backend.learning.lesson import acceptance_lengths, collate, loss_of
from backend.learning.optimizers import Optimizers
from backend.learning.ring import EXAMINED, Replay, ReplayRing, is_held_out
from backend.learning.rules import FEWEST, LEAST_GAIN, bound_of_gain
from backend.learning.trainable import LONGEST, load_pupil, save_pupil, trained_tensors

logger = logging.getLogger(__name__)

ROWS = 512
"""Most rows in a training step."""
SCORES = 1 << 26
"""Most scores (rows times vocabulary) in a training step; they take most of the memory."""
DEPTH = 4
"""Tokens per draft that the head is trained for."""
SHALLOW = (80, 240)
"""Steps after which drafts of two tokens, and then of `DEPTH`, are trained: later tokens build on the first."""
PASSES = 6
"""How often each row is trained on, if the ring keeps it so long."""
WARM_UP = 10
"""Steps over which the learning rates rise."""
SLOWER_AFTER = 1000
"""Steps after which the learning rates fall, with the inverse square root."""
MATRIX_RATE, OTHER_RATE = 0.015, 2e-3
AVERAGED = 0.95
"""Decay of the running mean of weights.  Candidates are this mean: it is steadier than one step's weights."""
RECENT = 0.1
"""Weight of a step's loss in the reported mean."""
EXAMINED_EVERY = 40
"""Steps between two comparisons."""
CHECKPOINT_S = 60.0
POLL_S = 1.0
CHECKPOINT = "trainer.pt"
VERSIONS = "versions"


class Job(msgspec.Struct, frozen=True):
    """What a trainer works on, and where."""

    target_dir: str
    head_dir: str
    """Directory of the head that drafts at present."""
    directory: str
    """The trainer's own directory, for versions and its checkpoint."""
    ring_dir: str
    device: str = "cpu"
    newer: str = ""
    """A file of target tensors that replace those in its directory; empty: none."""


class News(msgspec.Struct, frozen=True):
    """A trainer's progress.  `published`: directory of a new head that the drafter should draft with; else empty."""

    steps: int
    seconds: float
    owed: int = 0
    """Rows yet to be trained on, counted as often as each will be used."""
    loss: float | None = None
    """Mean over the latest steps."""
    present: float | None = None
    """Acceptance length of the present head on held-out sequences."""
    candidate: float | None = None
    """Acceptance length of the candidate."""
    published: str = ""


class TakenBack(msgspec.Struct, frozen=True, tag="taken back"):
    """Order: the drafter drafts with this earlier head again."""

    head_dir: str


class Followed(msgspec.Struct, frozen=True, tag="followed"):
    """Order: train against the target's new tensors, in this file."""

    newer: str


class Trainer:
    """The head in training, its optimizer, and its progress through the ring.  Used by one thread."""

    def __init__(self, job: Job) -> None:
        """Raises `CheckpointError`."""
        self._job = job
        self._device = torch.device(job.device)
        # As in `backend/drafter/head.py`: almost every step has another number of rows.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._ring = ReplayRing(Path(job.ring_dir), 0)
        self._random = random.Random(0)
        self.steps = 0
        self.seconds = 0.0
        self._loss: float | None = None
        self._credit = 0.0
        self._sizes: dict[int, int] = {}
        """Rows to train on of each present file: none of a held-out one."""
        for unfinished in (Path(job.directory) / VERSIONS).glob(".[0-9]*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        self._begin(job.head_dir)
        self._resume()

    def _begin(self, head_dir: str) -> None:
        """Starts training from the head in this directory."""
        self._present_dir = head_dir
        self._pupil = load_pupil(head_dir, self._job.target_dir, self._device, self._job.newer)
        drafter = self._pupil.drafter
        self._present = _copy(trained_tensors(drafter))
        self._mean = _copy(self._present)
        learned = [(name, each) for name, each in drafter.named_parameters() if each.requires_grad]
        self._optimizers = Optimizers(learned, MATRIX_RATE, OTHER_RATE, 0.0)
        self._since = 0
        self._scores: dict[int, float | None] = {}

    def take_back(self, head_dir: str) -> None:
        """Goes back to this head, and forgets what was learned since."""
        self._begin(head_dir)
        self.checkpoint()

    def follow(self, newer: str) -> None:
        """Trains against the target's new tensors, in the file `newer`; what was learned is kept."""
        self.checkpoint()
        self._job = msgspec.structs.replace(self._job, newer=newer)
        self._begin(self._present_dir)
        self._resume()

    @property
    def is_due(self) -> bool:
        """Whether it is time for a comparison, and enough sequences are held out for one."""
        return self._since >= EXAMINED_EVERY and sum(map(is_held_out, self._sizes)) >= FEWEST

    def step(self) -> bool:
        """Trains for one step.  False: the ring has too little new to learn from."""
        self._look()
        limit = min(ROWS, max(SCORES // self._pupil.output.shape[0], 64))
        numbers = [number for number in self._sizes if not is_held_out(number)]
        if self._credit < limit or not numbers:
            return False
        began = time.monotonic()
        replays: list[Replay] = []
        rows = 0
        while numbers and rows < limit:
            number = numbers.pop(self._random.randrange(len(numbers)))
            replay = self._ring.read(number)
            if replay is not None and len(replay.features) > DEPTH + 1:
                replays.append(replay.piece(min(limit - rows, LONGEST), self._random))
                rows += len(replays[-1].features)
        self._credit -= max(rows, 1)
        if not replays:
            return False
        depth = 1 + sum(1 if i == 0 else DEPTH - 2 for i, after in enumerate(SHALLOW) if self.steps >= after)
        with _narrow(self._device):
            loss = loss_of(self._pupil, collate(replays, self._device), depth)
        if math.isfinite(value := loss.item()):
            self._loss = value if self._loss is None else self._loss + RECENT * (value - self._loss)
            torch.autograd.backward(loss)
            self._optimizers.step(min((self.steps + 1) / WARM_UP, math.sqrt(SLOWER_AFTER / max(self.steps, SLOWER_AFTER))))
            for name, tensor in trained_tensors(self._pupil.drafter).items():
                self._mean[name].lerp_(tensor, 1 - min(AVERAGED, (1 + self._since) / (10 + self._since)))
        self.steps, self._since = self.steps + 1, self._since + 1
        self.seconds += time.monotonic() - began
        return True

    def examine(self) -> News | None:
        """Compares the candidate with the present head; publishes it if it surely gains more than `LEAST_GAIN`.

        None: too few held-out sequences.  Raises `OSError`.
        """
        self._since = 0
        numbers = [number for number in sorted(self._sizes) if is_held_out(number)][-EXAMINED:]
        own = _copy(trained_tensors(self._pupil.drafter))
        unscored = [number for number in numbers if number not in self._scores]
        self._scores |= self._score(self._present, unscored)
        candidate = self._score(self._mean, numbers)
        self._put(own)
        pairs = [(old, new) for n in numbers if (old := self._scores[n]) is not None and (new := candidate[n]) is not None]
        present, proposed = [old for old, _ in pairs], [new for _, new in pairs]
        bound = bound_of_gain(present, proposed)
        if bound is None:
            return None
        logger.info("step %d: candidate gains more than %.1f %%", self.steps, 100 * bound)
        return self.news(fmean(present), fmean(proposed), self.publish() if bound > LEAST_GAIN else "")

    def publish(self) -> str:
        """Writes the candidate, from now on the present head.  Returns its directory.  Raises `OSError`."""
        versions = Path(self._job.directory) / VERSIONS
        directory = versions / f"{newest_version(versions)[0] + 1:06d}"
        save_pupil(self._pupil, self._mean, directory)
        self._present, self._present_dir, self._scores = _copy(self._mean), str(directory), {}
        self.checkpoint()
        return str(directory)

    def checkpoint(self) -> None:
        """Writes the trainer's state.  Raises `OSError`."""
        state = {
            "present": self._present_name,
            "drafter": trained_tensors(self._pupil.drafter),
            "mean": self._mean,
            "optimizers": [part.state_dict() for part in self._optimizers.parts],
            "counts": [self.steps, self.seconds],
        }
        path = Path(self._job.directory) / CHECKPOINT
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def news(self, present: float | None = None, candidate: float | None = None, published: str = "") -> News:
        """The present progress."""
        return News(self.steps, round(self.seconds, 3), int(self._credit), self._loss, present, candidate, published)

    @property
    def _present_name(self) -> str:
        """The present head's directory; relative in the folder of all drafters, which may be moved."""
        folder, head = Path(self._job.directory).parent, Path(self._present_dir)
        return str(head.relative_to(folder) if head.is_relative_to(folder) else head)

    def _resume(self) -> None:
        path = Path(self._job.directory) / CHECKPOINT
        try:
            state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
            if state["present"] not in (self._present_name, self._present_dir):
                logger.warning("%s is not used: its head is %s, not %s", path, state["present"], self._present_name)
                return
            self._put(state["drafter"])
            for part, saved in zip(self._optimizers.parts, state["optimizers"], strict=True):
                part.load_state_dict(saved)
            self._mean = state["mean"]
            self.steps, self.seconds = state["counts"]
        except FileNotFoundError:
            return
        except Exception as error:  # a damaged file may raise anything
            logger.warning("%s is not used: %s", path, error)
            self._begin(self._present_dir)

    def _look(self) -> None:
        """Notes which sequences have come and gone."""
        numbers = self._ring.numbers()
        for number in numbers:
            if number not in self._sizes:
                replay = None if is_held_out(number) else self._ring.read(number)
                self._sizes[number] = 0 if replay is None else min(len(replay.features), LONGEST)
                self._credit += PASSES * self._sizes[number]
        self._sizes = {number: self._sizes[number] for number in numbers}
        # Rows that have left the ring are not owed any more.
        self._credit = min(self._credit, PASSES * sum(self._sizes.values()))

    def _score(self, tensors: dict[str, Tensor], numbers: list[int]) -> dict[int, float | None]:
        self._put(tensors)
        found: dict[int, float | None] = {}
        for number in numbers:
            replay = self._ring.read(number)
            found[number] = None
            if replay is None or len(replay.features) <= DEPTH + 1:
                continue
            with _narrow(self._device):
                found[number] = acceptance_lengths(self._pupil, collate([replay], self._device), DEPTH)[0]
        return found

    def _put(self, tensors: dict[str, Tensor]) -> None:
        self._pupil.drafter.load_state_dict(tensors, strict=False)


def newest_version(versions: Path) -> tuple[int, str | None]:
    """The number and directory of the latest published head; 0 and None if there is none."""
    found = [path for path in versions.glob("*") if path.name.isdecimal() and (path / "config.json").is_file()]
    latest = max(found, key=lambda path: int(path.name), default=None)
    return (int(latest.name), str(latest)) if latest is not None else (0, None)


def _narrow(device: torch.device) -> torch.autocast:
    """Products in bfloat16, if the device has units for it.  With a CPU's (AMX) a step takes two thirds of the time."""
    fast = device.type == "cuda" or bool(torch.cpu.get_capabilities().get("amx_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _run(trainer: Trainer, orders: list[TakenBack | Followed]) -> None:
    saved = reported_at = time.monotonic()
    while True:
        while orders:
            order = orders.pop(0)
            if isinstance(order, TakenBack):
                trainer.take_back(order.head_dir)
            else:
                trainer.follow(order.newer)
        worked = trainer.step()
        examined = trainer.examine() if trainer.is_due else None
        now = time.monotonic()
        if examined is not None or now - reported_at > POLL_S:
            reported_at = now
            _tell(examined or trainer.news())
        if worked and now - saved > CHECKPOINT_S:
            saved = now
            trainer.checkpoint()
        if not worked:
            time.sleep(POLL_S)


def _tell(news: News) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def _listen(orders: list[TakenBack | Followed]) -> None:
    """Collects orders until the drafter ends, then ends this process."""
    for line in sys.stdin.buffer:
        orders.append(msgspec.json.decode(line, type=TakenBack | Followed))
    os._exit(0)


def main() -> None:
    configure_logging("info")
    give_way()
    torch.set_num_threads(1)
    orders: list[TakenBack | Followed] = []
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    _run(Trainer(msgspec.json.decode(sys.argv[1], type=Job)), orders)


def give_way() -> None:
    """Gives this process the lowest priority, below all others."""
    os.nice(19)
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        # Not Linux, or a sandbox forbids it: niceness 19 is the next best.
        pass


if __name__ == "__main__":
    main()
