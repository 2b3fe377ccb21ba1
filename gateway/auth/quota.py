"""How much each key has used, and whether it may use more.  Pure: callers pass the time.

A limit per minute is a bucket that holds one minute's limit and drains evenly.  After a pause a key may use a minute's limit at
once, then as much as drains: in any T seconds at most (1 + T / 60) limits, and what older requests give back in that time.
Refused requests do not count.

Several gateways share buckets: at each exchange, every gateway adds what it has used since the last one (`take`, `absorb`).
In between they may together admit too much.  The excess stays in the bucket, and delays later requests.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gateway.http.errors import RateLimited

MINUTE_S = 60.0
Kind = Literal["requests", "tokens"]
_NAMES: dict[Kind, str] = {"requests": "requests per min (RPM)", "tokens": "tokens per min (TPM)"}


@dataclass(slots=True)
class Bucket:
    """What was used of one limit: `used` at the time `at` (monotonic seconds)."""

    kind: Kind
    limit: int | None = None
    """Per minute; None: no limit, and nothing is counted."""
    used: float = 0.0
    at: float = 0.0
    since: float = 0.0
    """Used here since the last exchange."""

    def level(self, now: float) -> float:
        """What is in the bucket now."""
        return max(0.0, self.used - max(0.0, now - self.at) * (self.limit or 0) / MINUTE_S)

    def add(self, amount: float, now: float) -> None:
        """Adds what was used, even above the limit; a negative amount is taken out."""
        if self.limit is not None:
            self.used, self.at = max(0.0, self.level(now) + amount), now
            self.since += amount

    def spend(self, amount: int, now: float) -> None:
        """Adds an amount that fits.  Raises `RateLimited`."""
        limit, name = self.limit, _NAMES[self.kind]
        if limit is None:
            return
        if amount > limit:
            message = f"The request is larger than this key's limit on {name}, which is {limit}. Ask for fewer tokens."
            raise RateLimited(message, self.kind, None)
        over = self.level(now) + amount - limit
        # Less than a thousandth is a rounding error.
        if over > 1e-3:
            wait_s = over * MINUTE_S / limit
            again = duration(max(wait_s, 0.001))
            message = f"Rate limit reached for this key on {name}: limit {limit}. Please try again in {again}."
            raise RateLimited(message, self.kind, wait_s)
        self.add(amount, now)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers with the rest of the limit."""
        if self.limit is None:
            return []
        level = self.level(now)
        values = {
            "limit": str(self.limit),
            "remaining": str(max(0, math.floor(self.limit - level + 1e-6))),
            "reset": duration(level * MINUTE_S / self.limit),
        }
        return [(f"x-ratelimit-{what}-{self.kind}".encode(), value.encode()) for what, value in values.items()]


class Buckets(dict[tuple[str, Kind], Bucket]):
    """One gateway's buckets, by the names of keys and what they limit."""

    def __missing__(self, key: tuple[str, Kind]) -> Bucket:
        bucket = self[key] = Bucket(key[1])
        return bucket


# Several gateways


class Use(NamedTuple):
    """A gateway's part in an exchange: what was used of one bucket there since the last one, and how fast the bucket drains."""

    name: str
    kind: Kind
    amount: float
    limit: int


class SharedUse(NamedTuple):
    """What one bucket contained after it was last used, by any gateway, and the seconds since then."""

    name: str
    kind: Kind
    used: float
    age_s: float


def take(buckets: Buckets) -> list[Use]:
    """What was used here since the last exchange."""
    used = ((name, kind, each.since, each.limit) for (name, kind), each in buckets.items() if each.since)
    return [Use(name, kind, amount, limit) for name, kind, amount, limit in used if limit is not None]


def absorb(buckets: Buckets, uses: list[Use], shared: list[SharedUse], now: float) -> None:
    """Takes over the use of all gateways, with these `uses` of this one's, and adds what was used here since `take`."""
    for use in uses:
        buckets[use.name, use.kind].since -= use.amount
    for theirs in shared:
        bucket = buckets[theirs.name, theirs.kind]
        bucket.used, bucket.at = theirs.used, now - theirs.age_s
        here, bucket.since = bucket.since, 0.0
        bucket.add(here, now)


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000 - 1e-6)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    whole = math.ceil(seconds - 1e-6)
    return f"{whole // 60}m{whole % 60}s"
