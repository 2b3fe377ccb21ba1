"""The shared store in which several gateways add up the use of keys: a SQLite file on one host, Redis for several hosts.

An exchange is one transaction: it adds this gateway's use and returns the use of all.  Buckets drain by the store's clock.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any, Protocol

from gateway.keys.quota import MINUTE_S, Bucket, Shared, Use
from gateway.sqlite import Database

GONE_S = 10.0
"""Seconds of silence after which a gateway's open requests no longer count."""
KEPT_S = 600
"""Seconds without use after which Redis forgets a key's counts."""
REDIS_TIMEOUT_S = 0.5
"""Seconds that an idle key's first request may wait for Redis.  If Redis fails, each gateway counts for itself."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS buckets (name TEXT, kind TEXT, used REAL, at REAL, PRIMARY KEY (name, kind)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open (name TEXT, gateway TEXT, count INTEGER, at REAL, PRIMARY KEY (name, gateway)) WITHOUT ROWID;
"""

_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local asked = cjson.decode(ARGV[1])
local answer = {}
for index, use in ipairs(asked.uses) do
  local bucket, open = KEYS[2 * index - 1], KEYS[2 * index]
  local was = redis.call('HMGET', bucket, 'requests', 'tokens', 'at')
  local past = math.max(0, now - (tonumber(was[3]) or now))
  local requests = math.max(0, math.max(0, (tonumber(was[1]) or 0) - past * use[4] / asked.minute) + use[1])
  local tokens = math.max(0, math.max(0, (tonumber(was[2]) or 0) - past * use[5] / asked.minute) + use[2])
  redis.call('HSET', bucket, 'requests', tostring(requests), 'tokens', tostring(tokens), 'at', string.format('%.6f', now))
  redis.call('HSET', open, asked.gateway, string.format('%d %.6f', use[3], now))
  redis.call('EXPIRE', bucket, asked.kept)
  redis.call('EXPIRE', open, asked.kept)
  local elsewhere, all = 0, redis.call('HGETALL', open)
  for at = 1, #all, 2 do
    local count, heard = string.match(all[at + 1], '(%S+) (%S+)')
    if now - tonumber(heard) > asked.gone then
      redis.call('HDEL', open, all[at])
    elseif all[at] ~= asked.gateway then
      elsewhere = elsewhere + tonumber(count)
    end
  end
  answer[index] = {tostring(requests), tostring(tokens), elsewhere}
end
return cjson.encode(answer)
"""


class Store(Protocol):
    """Counters that several gateways share."""

    async def exchange(self, gateway: str, uses: list[Use]) -> dict[str, Shared]:
        """Adds what keys have used at this gateway.  Returns, by key, their use at all gateways.  Raises `OSError`."""
        ...

    async def close(self) -> None: ...


class FileStore:
    """A SQLite file, for the gateways of one host.  It is accessed on a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, _SCHEMA)

    async def exchange(self, gateway: str, uses: list[Use]) -> dict[str, Shared]:
        try:
            return await self._database.run(lambda db: _exchange(db, gateway, uses, time.time()))
        except sqlite3.Error as error:
            raise OSError(f"the file of shared quotas: {error}") from None

    async def close(self) -> None:
        await asyncio.to_thread(self._database.close)


def _exchange(db: sqlite3.Connection, gateway: str, uses: list[Use], now: float) -> dict[str, Shared]:
    # Locks before the first read, so that no other gateway writes between reading and writing.
    db.execute("BEGIN IMMEDIATE")
    answer = {}
    for use in uses:
        db.execute("INSERT OR REPLACE INTO open VALUES (?,?,?,?)", (use.name, gateway, use.open, now))
        query = "SELECT sum(count) FROM open WHERE name = ? AND gateway <> ? AND at > ?"
        elsewhere = db.execute(query, (use.name, gateway, now - GONE_S)).fetchone()[0] or 0
        requests = _add(db, use.name, "requests", use.requests, use.requests_limit, now)
        tokens = _add(db, use.name, "tokens", use.tokens, use.tokens_limit, now)
        answer[use.name] = Shared(requests, tokens, elsewhere)
    db.execute("DELETE FROM open WHERE at < ?", (now - GONE_S,))
    return answer


def _add(db: sqlite3.Connection, name: str, kind: str, amount: float, limit: int, now: float) -> float:
    found = db.execute("SELECT used, at FROM buckets WHERE name = ? AND kind = ?", (name, kind)).fetchone()
    bucket = Bucket(*(found or (0.0, now)))
    bucket.add(amount, limit, now)
    db.execute("INSERT OR REPLACE INTO buckets VALUES (?,?,?,?)", (name, kind, bucket.used, now))
    return bucket.used


class RedisStore:
    """Redis, for gateways on several hosts.  Requires the extra `redis`."""

    def __init__(self, url: str) -> None:
        try:
            import redis
            import redis.asyncio
        except ImportError:
            raise ValueError("Redis needs a package: pip install 'outrider[redis]'") from None
        self._client: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=REDIS_TIMEOUT_S, socket_connect_timeout=REDIS_TIMEOUT_S
        )
        self._error = redis.RedisError
        self._script = self._client.register_script(_SCRIPT)

    async def exchange(self, gateway: str, uses: list[Use]) -> dict[str, Shared]:
        asked = {
            "gateway": gateway,
            "minute": MINUTE_S,
            "gone": GONE_S,
            "kept": KEPT_S,
            "uses": [[use.requests, use.tokens, use.open, use.requests_limit, use.tokens_limit] for use in uses],
        }
        # All names have one hash tag, because a script's keys must lie on one node of a cluster.
        names = [f"{{outrider}}:{use.name}:{part}" for use in uses for part in ("used", "open")]
        try:
            answer = json.loads(await self._script(keys=names, args=[json.dumps(asked)]))
        except self._error as error:
            raise OSError(f"Redis: {type(error).__name__}") from None
        return {
            use.name: Shared(float(requests), float(tokens), int(elsewhere))
            for use, (requests, tokens, elsewhere) in zip(uses, answer, strict=True)
        }

    async def close(self) -> None:
        await self._client.aclose()


def open_store(url: str | None, folder: Path | None) -> Store | None:
    """Redis at `url`, else a file in `folder`, else None: no sharing.  Raises `OSError` or `ValueError`."""
    if url is not None:
        return RedisStore(url)
    try:
        return None if folder is None else FileStore(folder / "quotas.sqlite")
    except sqlite3.Error as error:
        raise OSError(f"the file of shared quotas: {error}") from None
