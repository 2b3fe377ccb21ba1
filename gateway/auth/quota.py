"""How much each key has used, and whether it may use more.  Pure: callers pass the time.

A limit per minute is a bucket that holds one minute's limit and drains evenly.  After a pause a key may use a minute's limit at
once, then as much as drains: in any T seconds at most (1 + T / 60) limits, and what older requests give back in that time.
Refused requests do not count.

Several gateways share buckets: at each exchange, every gateway adds what it has used since the last one (`take`, `absorb`).
In between they may together admit too much.  The excess stays in the bucket, and delays later requests.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from gateway.auth.caller import UNLIMITED, KeyLimits
from gateway.http.errors import RateLimited

MINUTE_S = 60.0
_NAMES = {"requests": "requests per min (RPM)", "tokens": "tokens per min (TPM)"}


@dataclass(slots=True)
class Bucket:
    """A bucket that was filled up to `used` at the time `at` (monotonic seconds)."""

    used: float = 0.0
    at: float = 0.0
    since: float = 0.0
    """Used here since the last exchange."""

    def level(self, limit: int, now: float) -> float:
        """What is in the bucket now."""
        return max(0.0, self.used - max(0.0, now - self.at) * limit / MINUTE_S)

    def add(self, amount: float, limit: int, now: float) -> None:
        """Adds what was used; a negative amount is taken out."""
        self.used, self.at = max(0.0, self.level(limit, now) + amount), now
        self.since += amount


@dataclass(slots=True)
class KeyAccount:
    """What one key has used, here and at other gateways."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    open: int = 0
    """Requests being served here."""
    open_elsewhere: int = 0
    synced_at: float = -math.inf
    """Monotonic seconds of the last exchange with other gateways."""
    touched_at: float = -math.inf
    limits: KeyLimits = UNLIMITED
    """The key's limits when it was last used."""


@dataclass(frozen=True, slots=True)
class Use:
    """One account's part in an exchange: what was used here since the last one, and the limits by which its buckets drain."""

    name: str
    requests: float
    tokens: float
    open: int
    requests_limit: int
    tokens_limit: int


@dataclass(frozen=True, slots=True)
class SharedUse:
    """One account's result of an exchange: the use by all gateways together."""

    requests: float
    tokens: float
    open_elsewhere: int


class Ledger:
    """The accounts of this gateway, by the names of keys."""

    def __init__(self) -> None:
        self._accounts: dict[str, KeyAccount] = {}

    def account(self, name: str, limits: KeyLimits, now: float) -> KeyAccount:
        """The account of a key whose limits are now `limits`."""
        account = self._accounts.setdefault(name, KeyAccount())
        account.limits, account.touched_at = limits, now
        return account

    def begin(self, name: str, limits: KeyLimits, now: float) -> None:
        """Counts one more request; `end` ends it.  Raises `RateLimited`."""
        account = self.account(name, limits, now)
        most = limits.concurrent_requests
        if most is not None and account.open + account.open_elsewhere >= most:
            message = f"This key's limit on concurrent requests is {most}. Try again when one has ended."
            raise RateLimited(message, "concurrency")
        if limits.requests_per_minute is not None:
            _take(account.requests, "requests", 1, limits.requests_per_minute, now)
        account.open += 1

    def end(self, name: str, refused_at: float | None = None) -> None:
        """Ends a request; one that was refused after `begin` does not count."""
        account = self._accounts[name]
        account.open -= 1
        if refused_at is not None and account.limits.requests_per_minute is not None:
            account.requests.add(-1, account.limits.requests_per_minute, refused_at)

    def spend(self, name: str, limits: KeyLimits, tokens: int, now: float) -> None:
        """Counts a request's estimated tokens.  Raises `RateLimited`."""
        if limits.tokens_per_minute is not None:
            _take(self.account(name, limits, now).tokens, "tokens", tokens, limits.tokens_per_minute, now)

    def correct(self, name: str, limits: KeyLimits, tokens: int, now: float) -> None:
        """Counts tokens that a request used beyond its estimate, even above the limit; negative: gives tokens back."""
        if limits.tokens_per_minute is not None and tokens:
            self.account(name, limits, now).tokens.add(tokens, limits.tokens_per_minute, now)

    def headers(self, name: str, limits: KeyLimits, now: float) -> list[tuple[bytes, bytes]]:
        account = self.account(name, limits, now)
        result: list[tuple[bytes, bytes]] = []
        for kind, bucket, limit in (
            (b"requests", account.requests, limits.requests_per_minute),
            (b"tokens", account.tokens, limits.tokens_per_minute),
        ):
            if limit is not None:
                level = bucket.level(limit, now)
                left = max(0, math.floor(limit - level + 1e-6))
                result += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % left),
                    (b"x-ratelimit-reset-" + kind, duration(level * MINUTE_S / limit).encode()),
                ]
        return result

    # Several gateways

    def take(self, now: float) -> list[Use]:
        """What was used here since the last exchange, for every account in use."""
        result = []
        for name, account in self._accounts.items():
            if account.open or now - account.touched_at < MINUTE_S or account.requests.since or account.tokens.since:
                requests, tokens = account.limits.requests_per_minute or 0, account.limits.tokens_per_minute or 0
                result.append(Use(name, account.requests.since, account.tokens.since, account.open, requests, tokens))
        return result

    def absorb(self, uses: list[Use], shared: dict[str, SharedUse], now: float) -> None:
        """Takes over the use of all gateways, with these `uses` of this one's, and adds what was used here since `take`."""
        for use in uses:
            account, theirs = self._accounts[use.name], shared[use.name]
            for bucket, sent, used in (
                (account.requests, use.requests, theirs.requests),
                (account.tokens, use.tokens, theirs.tokens),
            ):
                bucket.since -= sent
                bucket.used, bucket.at = max(0.0, used + bucket.since), now
            account.open_elsewhere, account.synced_at = theirs.open_elsewhere, now


def _take(bucket: Bucket, kind: Literal["requests", "tokens"], amount: int, limit: int, now: float) -> None:
    if amount > limit:
        message = f"The request is larger than this key's limit on {_NAMES[kind]}, which is {limit}. Ask for fewer tokens."
        raise RateLimited(message, kind, None)
    over = bucket.level(limit, now) + amount - limit
    # Less than a thousandth is a rounding error.
    if over > 1e-3:
        wait_s = over * MINUTE_S / limit
        again = duration(max(wait_s, 0.001))
        message = f"Rate limit reached for this key on {_NAMES[kind]}: limit {limit}. Please try again in {again}."
        raise RateLimited(message, kind, wait_s)
    bucket.add(amount, limit, now)


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000 - 1e-6)}ms"
    if seconds < 60:
        return f"{round(seconds, 3):g}s"
    whole = math.ceil(seconds - 1e-6)
    return f"{whole // 60}m{whole % 60}s"
