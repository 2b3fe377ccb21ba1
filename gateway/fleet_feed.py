"""Watches the fleet once a second, and sends the latest view to the clients of `/fleet/events`.

One task in the gateway's event loop.  A view is made and encoded once a second for all clients, and not at all without clients.
A slow client misses views.  Views do not queue up for it, and other clients do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from backend.fleet import FleetSnapshot
from gateway.errors import TooManyRequests
from gateway.fleet_core import FleetCore
from gateway.fleet_history import FleetHistory, Observation
from gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
MAX_LISTENERS = 32


class FleetFeed:
    """The source of `/fleet/events`.  `about` is for the page's head; `metrics` counts this gateway's requests."""

    def __init__(self, core: FleetCore, about: Mapping[str, object], metrics: GatewayMetrics) -> None:
        self._core = core
        self._about = msgspec.json.encode(about)
        self._metrics = metrics
        self._history = FleetHistory()
        self._snapshot: FleetSnapshot | None = None
        self._answered = 0.0
        self._number = 0
        self._event: bytes | None = None
        self._tick = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self.listeners = 0

    def start(self) -> None:
        """Begins to watch; requires a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._watch(), name="fleet-feed")

    def close(self) -> None:
        """Ends every listener's stream, and the watching."""
        self._closed = True
        self._tick.set()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                # An error of the page must not end the gateway; the next tick tries again.
                logger.exception("the fleet page's view failed")
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Takes in the fleet as it is now and wakes the listeners."""
        core, now = self._core, time.monotonic()
        if core.snapshot is not self._snapshot:
            self._snapshot, self._answered = core.snapshot, now
        self._history.observe(
            Observation(
                now,
                time.time(),
                core.snapshot,
                snapshot_age_s=now - self._answered,
                own={stats.verifier_id: stats for stats in core.stats()},
                connected=frozenset(link.member.id for link in core.ready_links),
                in_flight=self._metrics.in_flight,
                moves=self._metrics.moves,
            )
        )
        self._number += 1
        self._event = None
        tick, self._tick = self._tick, asyncio.Event()
        tick.set()

    def event(self) -> bytes:
        """The latest view as a server-sent event."""
        if self._event is None:
            view = msgspec.json.encode(self._history.view())
            self._event = b'event: fleet\nid: %d\ndata: {"about":%s,"fleet":%s}\n\n' % (self._number, self._about, view)
        return self._event

    async def events(self) -> AsyncIterator[bytes]:
        """The latest view now, and again whenever there is a newer one, until the feed closes."""
        while not self._closed:
            # Taken before the view is sent, because the next tick may come while a slow client still reads this view.
            tick = self._tick
            yield self.event()
            await tick.wait()

    @contextmanager
    def seat(self) -> Iterator[None]:
        """Counts one client during the block.  Raises `TooManyRequests` if there are too many."""
        if self.listeners >= MAX_LISTENERS:
            raise TooManyRequests(f"More than {MAX_LISTENERS} are watching the fleet. Try again.")
        self.listeners += 1
        try:
            yield
        finally:
            self.listeners -= 1


class FleetStream(EventSourceResponse):
    """The response of `/fleet/events`."""

    def __init__(self, feed: FleetFeed) -> None:
        # No pings: a view goes out every second.
        super().__init__(feed.events(), sep="\n", ping=0)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.seat():
            await super().__call__(scope, receive, send)
