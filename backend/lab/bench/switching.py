"""A verifier whose records can be switched off and on while it rests.  Child processes of `records_cost`.

The main thread switches, between two loads; what a switch changes is read by the engine thread at its next step.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from backend.engine.loop import EngineLoop
from backend.lab.bench.stopwatch import TimedRecording
from backend.records.writer import FileRecorder
from backend.transport import Hub
from backend.verifier.process import VerifierProcess

SETTLED_S = 0.02
"""A writer that has not computed for so long, with nothing waiting, is done."""


class SwitchedVerifier(VerifierProcess):
    """One that keeps records in files, as its settings have to say."""

    def _make_loop(self, config: Any, core: Any, hub: Hub, stats: Any, files: FileRecorder | None) -> EngineLoop:
        loop = super()._make_loop(config, core, hub, stats, files)
        if files is None:
            raise ValueError("records.dir is not set")
        self._files = files
        self._scheduler = core.scheduler
        self._recording = core.scheduler.records
        self._timed = TimedRecording(self._recording)
        return loop

    def switch(self, on: bool, timed: bool = False) -> dict[str, float]:
        """From now on rows are made, or none are, as if records had never been configured; nothing may be in flight.

        `timed` rows are made under a stopwatch, which itself takes about a microsecond per call: `rows_s` is its sum so far.

        Before they are switched off the writer takes what is left: `settling_s` is what it computed for that.  Further CPU
        times, in seconds: of the process when this was called (`called_s`) and when it is done (`done_s`), and of the writer's
        thread so far, files included (`writer_s`).
        """
        called_s, settling_s = time.process_time(), 0.0
        if not on and self._scheduler.records is not None:
            settling_s = self._settle()
        self._scheduler.records = (self._timed if timed else self._recording) if on else None
        return {
            "rows_s": self._timed.spent_s,
            "settling_s": settling_s,
            "writer_s": self._files.cpu_s(),
            "called_s": called_s,
            "done_s": time.process_time(),
        }

    def _settle(self) -> float:
        before = last = self._files.cpu_s()
        while True:
            threading.Event().wait(SETTLED_S)
            now = self._files.cpu_s()
            if not self._files.waiting and now == last:
                return now - before
            last = now
