"""Applies quotas to requests, and exchanges counts with other gateways of this host.  Runs in the gateway's event loop.

The gateways add up the use of keys in a SQLite file.  An exchange is one transaction, on the file's thread.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gateway.auth.caller import Caller
from gateway.auth.quota import Bucket, Buckets, Kind, SharedUse, Use, absorb, take
from gateway.http.errors import RateLimited
from gateway.storage.sqlite import Database, exclusive

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.25
"""Seconds between two exchanges with other gateways.  What other gateways admit in that time can exceed a limit."""
GONE_S = 10.0
"""Seconds of silence after which a gateway's open requests no longer count."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (name TEXT, kind TEXT, used REAL, at REAL, PRIMARY KEY (name, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open (name TEXT, gateway TEXT, count INTEGER, at REAL, PRIMARY KEY (name, gateway)) WITHOUT ROWID;
"""


class SharedCounters(Database):
    """Counters that several gateways share."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)

    @exclusive
    def sync_usage(
        self, db: sqlite3.Connection, gateway: str, uses: list[Use], counted: dict[str, int], since: float
    ) -> tuple[float, list[SharedUse], dict[str, int]]:
        """Adds what was used at this gateway, and sets its counts of open requests, by key.  Raises `sqlite3.Error`.

        Returns the present time (Unix seconds), the buckets that any gateway has used from the time `since` on, and the open
        requests of all other gateways, by key.
        """
        now = time.time()
        for name, kind, amount, limit in uses:
            found = db.execute("SELECT used, at FROM buckets WHERE name = ? AND kind = ?", (name, kind)).fetchone()
            bucket = Bucket(kind, limit, *(found or (0.0, now)))
            bucket.add(amount, now)
            db.execute("INSERT OR REPLACE INTO buckets VALUES (?,?,?,?)", (name, kind, bucket.used, now))
        db.execute("DELETE FROM open WHERE gateway = ? OR at < ?", (gateway, now - GONE_S))
        db.executemany("INSERT INTO open VALUES (?,?,?,?)", [(name, gateway, count, now) for name, count in counted.items()])
        shared = db.execute("SELECT name, kind, used, ? - at FROM buckets WHERE at >= ?", (now, since))
        elsewhere = db.execute("SELECT name, sum(count) FROM open WHERE gateway <> ? GROUP BY name", (gateway,))
        return now, [SharedUse(*each) for each in shared], dict(elsewhere)


class Quotas:
    """All keys' quotas.  `store` is shared with other gateways; None: no others count."""

    def __init__(self, gateway_id: str, store: SharedCounters | None) -> None:
        self._gateway_id = gateway_id
        self._store = store
        self._buckets = Buckets()
        self._open: Counter[str] = Counter()
        """Requests being served here, by the names of keys."""
        self._open_elsewhere: dict[str, int] = {}
        self._exchanged_at = 0.0
        """When (the store's time): what was used before is known here."""
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._failing = False

    async def start(self) -> None:
        """Learns what other gateways have counted, and goes on exchanging counts."""
        if self._store is not None:
            await self._exchange(self._store)
            self._task = asyncio.create_task(self._exchange_forever(self._store), name="quotas")

    async def close(self) -> None:
        """Exchanges counts a last time, and closes the store."""
        self._closing.set()
        if self._task is not None:
            await self._task
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    @contextlib.contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """Counts a request of this caller, which is served in the block.  One that is refused there does not count.

        Raises `RateLimited`.
        """
        name, most = caller.name, caller.concurrent_requests
        if most is not None and self._open[name] + self._open_elsewhere.get(name, 0) >= most:
            raise RateLimited(f"This key's limit on concurrent requests is {most}. Try again when one has ended.")
        requests = self._bucket(caller, "requests")
        requests.spend(1, time.monotonic())
        self._open[name] += 1
        try:
            yield
        except RateLimited:
            requests.add(-1, time.monotonic())
            raise
        finally:
            self._open[name] -= 1

    def spend(self, caller: Caller, tokens: int) -> None:
        """Counts the tokens that a request will probably use.  Raises `RateLimited`."""
        self._bucket(caller, "tokens").spend(tokens, time.monotonic())

    def correct(self, caller: Caller, tokens: int) -> None:
        """Counts tokens that a request used beyond its estimate; negative: gives tokens back."""
        self._bucket(caller, "tokens").add(tokens, time.monotonic())

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        now = time.monotonic()
        return self._bucket(caller, "requests").headers(now) + self._bucket(caller, "tokens").headers(now)

    def _bucket(self, caller: Caller, kind: Kind) -> Bucket:
        """A key's bucket, with the key's present limit."""
        bucket = self._buckets[caller.name, kind]
        bucket.limit = caller.requests_per_minute if kind == "requests" else caller.tokens_per_minute
        return bucket

    async def _exchange_forever(self, store: SharedCounters) -> None:
        while not self._closing.is_set():
            await self._exchange(store)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EXCHANGE_S)
        await self._exchange(store)

    async def _exchange(self, store: SharedCounters) -> None:
        uses = take(self._buckets)
        try:
            at, shared, elsewhere = await store.sync_usage(self._gateway_id, uses, +self._open, self._exchanged_at)
        except sqlite3.Error as error:
            if not self._failing:
                what = "quotas are not shared for now, every gateway counts for itself: the file of shared quotas: %s"
                logger.warning(what, error)
            self._failing = True
            return
        if self._failing:
            logger.info("quotas are shared again")
        self._failing, self._exchanged_at, self._open_elsewhere = False, at, elsewhere
        absorb(self._buckets, uses, shared, time.monotonic())
