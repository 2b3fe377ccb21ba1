"""How many sequences batches may have at the verifiers, beside interactive requests.

`room`, which is pure, computes the number.  `BatchPace` applies it several times a second, and whenever an interactive sequence
comes.  Excess sequences are taken from the verifiers at once, keep their tokens, and go on when there is room again.  Event
loop.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from backend.fleet.speed import Speed, mean_speed
from gateway.fleet.core import FleetCore

BUSY_STRETCH = 1.1
"""Factor by which batches may lengthen steps beside interactive sequences, whose tokens then take so much longer."""
QUIET_STRETCH = 4.0
"""Without interactive sequences, longest step over the step of one sequence.  The next interactive sequence may wait for it."""
QUIET_AFTER_S = 10.0
"""Seconds after the end of the last interactive sequence from which `QUIET_STRETCH` holds."""
KEPT_FREE = 0.25
"""Share of a verifier's slots that batches always leave free."""
LOOK_S = 0.1


def room(foreground: float, quiet: bool, verifiers: int, slots: int, speed: Speed | None) -> int:
    """How many sequences batches may have at `verifiers`, each with `slots`, beside `foreground` others.

    At least one, so that batches end; 0 if others fill the slots.
    """
    if not verifiers:
        return 0
    others = foreground / verifiers
    free = slots * (1 - KEPT_FREE) - others
    if free <= 0:
        return 0
    if speed is None:
        return verifiers
    spare_s = (QUIET_STRETCH - 1) * speed.step_s(1) if quiet else (BUSY_STRETCH - 1) * speed.step_s(max(others, 1))
    within = spare_s / speed.per_request_s if speed.per_request_s > 0 else math.inf
    return max(1, int(verifiers * min(free, within)))


class BatchPace:
    """Admits lines of batches, and holds back their sequences."""

    def __init__(self, core: FleetCore, slots: int) -> None:
        self._core = core
        self._slots = slots
        self._lines = 0
        self._busy_at = float("-inf")
        self._changed = asyncio.Event()
        self._first = asyncio.Lock()
        """Held by the one waiting line that looks for room: each look costs time."""

    async def keep(self) -> None:
        """Applies the limit again and again, until it is cancelled."""
        self._core.on_interactive = self._someone_comes
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for room for one line; the block carries it out."""
        async with self._first:
            while self._core.draining or self._taken >= self._room():
                await self._changed.wait()
            self._lines += 1
        try:
            yield
        finally:
            self._lines -= 1
            self._tell()

    @property
    def _taken(self) -> int:
        """Lines that have their turn, or batches' sequences (at verifiers and held), whichever are more."""
        return max(self._lines, self._core.sequences.batched + self._core.sequences.held)

    @property
    def quiet(self) -> bool:
        """Whether there were no interactive sequences for `QUIET_AFTER_S`."""
        return time.monotonic() - self._busy_at > QUIET_AFTER_S

    def _someone_comes(self) -> None:
        self._busy_at = time.monotonic()
        if self._core.sequences.batched:
            self._core.hold_batches(self._room())

    def look(self) -> None:
        """Applies the present limit to the sequences of batches."""
        if len(self._core.sequences) > self._core.sequences.batched + self._core.sequences.held:
            self._busy_at = time.monotonic()
        self._core.hold_batches(self._room())
        self._tell()

    def _room(self) -> int:
        core = self._core
        batched, own = core.sequences.batched, len(core.sequences) - core.sequences.batched - core.sequences.held
        reported = sum(stats.running + stats.waiting for stats in core.stats()) - batched
        speed = mean_speed([stats.speed for stats in core.stats() if stats.speed is not None])
        return room(max(own, reported), self.quiet, len(core.routable_links()), self._slots, speed)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
