"""Applies quotas to requests, and exchanges counts with other gateways.  Runs in the gateway's event loop."""

import asyncio
import logging
import sqlite3
import time

from gateway.auth.caller import UNLIMITED, Caller
from gateway.auth.quota import KeyAccount, Ledger
from gateway.auth.sharing import SharedCounters

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.25
"""Seconds between two exchanges with other gateways.  What other gateways admit in that time can exceed a limit."""


class Quotas:
    """All keys' quotas.  `store` is shared with other gateways; None: no others count."""

    def __init__(self, gateway_id: str, store: SharedCounters | None) -> None:
        self._gateway_id = gateway_id
        self._store = store
        self._ledger = Ledger()
        self._exchanging = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._failing = False

    def start(self) -> None:
        """Begins to exchange counts; requires a running event loop."""
        if self._store is not None and self._task is None:
            self._task = asyncio.create_task(self._exchange_forever(), name="quotas")

    async def close(self) -> None:
        """Exchanges counts a last time, and closes the store."""
        if self._store is None:
            return
        if self._task is not None:
            async with self._exchanging:
                # Not during an exchange: its transaction may be committed already, and would be counted again.
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._exchange()
        await asyncio.to_thread(self._store.close)

    async def begin(self, caller: Caller) -> None:
        """Counts one more request of this caller.  Call `end` when it is over.  Raises `RateLimited`."""
        limits = caller.limits
        if limits == UNLIMITED:
            return
        if self._store is not None:
            account = self._ledger.account(caller.name, limits, time.monotonic())
            if self._outdated(account):
                await self._exchange(account)
        self._ledger.begin(caller.name, limits, time.monotonic())

    def end(self, caller: Caller, *, refused: bool = False) -> None:
        """Ends a request.  One that was `refused` after `begin` does not count."""
        if caller.limits != UNLIMITED:
            self._ledger.end(caller.name, time.monotonic() if refused else None)

    def spend(self, caller: Caller, tokens: int) -> None:
        """Counts the tokens that a request will probably use.  Raises `RateLimited`."""
        self._ledger.spend(caller.name, caller.limits, tokens, time.monotonic())

    def correct(self, caller: Caller, tokens: int) -> None:
        """Counts tokens that a request used beyond its estimate; negative: gives tokens back."""
        self._ledger.correct(caller.name, caller.limits, tokens, time.monotonic())

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        return [] if caller.limits == UNLIMITED else self._ledger.headers(caller.name, caller.limits, time.monotonic())

    async def _exchange_forever(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_S)
            await self._exchange()

    def _outdated(self, account: KeyAccount) -> bool:
        return time.monotonic() - account.synced_at > 10 * EXCHANGE_S and not self._failing

    async def _exchange(self, account: KeyAccount | None = None) -> None:
        """Exchanges all counts.  With `account`, only if no exchange has succeeded or failed while this one waited."""
        assert self._store is not None
        async with self._exchanging:
            if account is not None and not self._outdated(account):
                return
            uses = self._ledger.take(time.monotonic())
            if not uses:
                return
            try:
                shared = await self._store.exchange(self._gateway_id, uses)
            except sqlite3.Error as error:
                if not self._failing:
                    what = "quotas are not shared for now, every gateway counts for itself: the file of shared quotas: %s"
                    logger.warning(what, error)
                self._failing = True
                return
            if self._failing:
                logger.info("quotas are shared again")
            self._failing = False
            self._ledger.absorb(uses, shared, time.monotonic())
