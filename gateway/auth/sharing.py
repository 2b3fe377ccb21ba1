"""The SQLite file in which the gateways of one host add up the use of keys.

An exchange is one transaction: it adds this gateway's use and returns the use of all.
"""

import sqlite3
import time
from pathlib import Path

from gateway.auth.quota import Bucket, SharedUse, Use
from gateway.storage.sqlite import Database, exclusive

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
    def exchange(
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
