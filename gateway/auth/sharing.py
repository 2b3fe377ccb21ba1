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
    def exchange(self, db: sqlite3.Connection, gateway: str, uses: list[Use]) -> dict[str, SharedUse]:
        """Adds what keys have used at this gateway.  Returns, by key, their use at all gateways.  Raises `sqlite3.Error`."""
        answer, now = {}, time.time()
        for use in uses:
            db.execute("INSERT OR REPLACE INTO open VALUES (?,?,?,?)", (use.name, gateway, use.open, now))
            query = "SELECT sum(count) FROM open WHERE name = ? AND gateway <> ? AND at > ?"
            elsewhere = db.execute(query, (use.name, gateway, now - GONE_S)).fetchone()[0] or 0
            requests = _add(db, use.name, "requests", use.requests, use.requests_limit, now)
            tokens = _add(db, use.name, "tokens", use.tokens, use.tokens_limit, now)
            answer[use.name] = SharedUse(requests, tokens, elsewhere)
        db.execute("DELETE FROM open WHERE at < ?", (now - GONE_S,))
        return answer


def _add(db: sqlite3.Connection, name: str, kind: str, amount: float, limit: int, now: float) -> float:
    found = db.execute("SELECT used, at FROM buckets WHERE name = ? AND kind = ?", (name, kind)).fetchone()
    bucket = Bucket(*(found or (0.0, now)))
    bucket.add(amount, limit, now)
    db.execute("INSERT OR REPLACE INTO buckets VALUES (?,?,?,?)", (name, kind, bucket.used, now))
    return bucket.used
