"""Whose code a thread's time goes to.  Child processes of `outrider bench --profile`, on the thread that is measured.

Methods are wrapped where they are defined; time in a wrapped method counts for its label until it calls another wrapped one.
`mark` ends a lap (an engine step, a drafting round).  The clock is the thread's CPU time: neither waiting nor what else the
machine does is in the figures, but the wrappers are, with about a microsecond each.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

WAIT = "waiting"
"""Polling: next to no CPU time, and no work."""
THEIRS = "vllm"
"""vLLM's own scheduling, forward and sampling."""
COMPUTE = "compute"
"""Matrix products we ask for: the head's `fc` on the verifier, the head itself on the drafter."""


class Stopwatch:
    """Laps of exclusive CPU times by label, in seconds.  One thread."""

    def __init__(self) -> None:
        self.laps: list[tuple[int, dict[str, float]]] = []
        """Requests in the lap, times by label."""
        self._lap: dict[str, float] = defaultdict(float)
        self._stack: list[str] = []
        self._since = 0.0

    def wrap(self, owner: Any, names: str, label: str) -> None:
        """Counts the time in these methods of a class (names separated by spaces) for `label`."""
        for name in names.split():
            setattr(owner, name, self._timed(getattr(owner, name), label))

    def mark(self, requests: int) -> None:
        """A lap of so many requests is over."""
        self.laps.append((requests, dict(self._lap)))
        self._lap.clear()

    def take(self) -> list[tuple[int, dict[str, float]]]:
        """The laps since the last call."""
        taken, self.laps = self.laps, []
        return taken

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            now = time.thread_time()
            if self._stack:
                self._lap[self._stack[-1]] += now - self._since
            self._stack.append(label)
            self._since = now
            try:
                return method(*args, **kwargs)
            finally:
                now = time.thread_time()
                self._lap[self._stack.pop()] += now - self._since
                self._since = now

        return timed


class TimedRecording:
    """Passes everything on to a `Recording` and adds up the CPU time it takes there, in seconds.  Engine thread."""

    def __init__(self, recording: Any) -> None:
        self.spent_s = 0.0
        self._recording = recording

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._recording, name)

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.thread_time()
            method(*args, **kwargs)
            self.spent_s += time.thread_time() - began

        setattr(self, name, timed)
        return timed


def watch_verifier() -> Stopwatch:
    """Wraps the verifier's classes; call before one is built.  A lap is an engine step that verified without prefill."""
    from backend.engine import build
    from backend.engine.counting import CountingScheduler
    from backend.engine.draft_links import DraftLinks
    from backend.engine.features import FeatureShipper
    from backend.engine.gateways import GatewayPort
    from backend.engine.loop import EngineLoop
    from backend.engine.runner import RemoteDrafting
    from backend.engine.scheduler import DraftingScheduler
    from backend.speculation.speculator import Speculator
    from backend.transport import Hub

    watch = Stopwatch()
    vllms = next(c for c in DraftingScheduler.__mro__ if c.__module__.startswith("vllm."))
    step = EngineLoop._step

    def marked_step(loop: Any) -> None:
        step(loop)
        watch.mark(0 if loop._scheduler._with_prefill else len(loop._scheduler.running))

    setattr(EngineLoop, "_step", marked_step)  # noqa: B010  (mypy: a method is not assigned to)
    watch.wrap(Hub, "poll", WAIT)
    watch.wrap(getattr(build, "EngineCore"), "step", THEIRS)  # noqa: B009  (not ours to export)
    watch.wrap(vllms, "schedule update_from_output update_draft_token_ids", THEIRS)
    watch.wrap(EngineLoop, "_receive _wait _idle _step _tick", "loop")
    watch.wrap(GatewayPort, "receive send_outputs send_stats", "gateway wire")
    watch.wrap(DraftLinks, "receive ask", "draft wire")
    watch.wrap(DraftingScheduler, "schedule update_from_output ask take_drafts take_ahead wait_until", "scheduler")
    watch.wrap(CountingScheduler, "schedule update_from_output", "counting")
    watch.wrap(Speculator, "attach ask hold arrived", "deciding")
    watch.wrap(Speculator, "learn forget", "learning")
    watch.wrap(RemoteDrafting, "propose_draft_token_ids", "spans")
    watch.wrap(FeatureShipper, "ship", "rounds")
    watch.wrap(FeatureShipper, "_features", COMPUTE)
    return watch


def watch_drafter() -> Stopwatch:
    """Wraps the drafter's classes; call before one is built.  A lap is a batch that drafted."""
    from backend.drafter.eagle import EagleProposer
    from backend.drafter.head import Head
    from backend.drafter.loop import DrafterLoop
    from backend.drafter.ngram import NgramProposer
    from backend.drafter.outcomes import Imagination
    from backend.drafter.service import DrafterService
    from backend.transport import Hub

    watch = Stopwatch()
    work = DrafterService.work

    def marked_work(service: Any) -> Any:
        before = service._counters.draft_tokens
        asked = len(service._waiting[0].message.items) if service._waiting else 0
        replies = work(service)
        watch.mark(asked if service._counters.draft_tokens > before else 0)
        return replies

    setattr(DrafterService, "work", marked_work)  # noqa: B010  (mypy: a method is not assigned to)
    watch.wrap(Hub, "poll", WAIT)
    watch.wrap(DrafterLoop, "_receive _send _house_keep", "wire")
    watch.wrap(DrafterService, "receive work", "service")
    watch.wrap(EagleProposer, "open commit draft imagine", "proposer")
    watch.wrap(NgramProposer, "open commit draft imagine", "proposer")
    watch.wrap(Imagination, "outcomes", COMPUTE)
    watch.wrap(Head, "forward read", COMPUTE)
    return watch
