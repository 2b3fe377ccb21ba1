"""Gateways that share counts through a SQLite file."""

import asyncio
import contextlib
import sqlite3

import pytest

from gateway.auth.caller import Caller
from gateway.auth.quota import Use
from gateway.auth.quotas import Quotas, SharedCounters
from gateway.http.errors import RateLimited

CALLER = Caller("team", "team", requests_per_minute=5, tokens_per_minute=1000, concurrent_requests=3)


@pytest.fixture
def store(tmp_path):
    """Makes stores over one and the same place."""
    with contextlib.ExitStack() as opened:
        yield lambda kind=SharedCounters: opened.enter_context(contextlib.closing(kind(tmp_path / "quotas.sqlite")))


def left(quotas):
    return int(dict(quotas.headers(CALLER))[b"x-ratelimit-remaining-requests"])


async def used(store, kind="requests"):
    return {each.kind: each.used for each in (await store.sync_usage("nobody", [], {}, 0.0))[1]}.get(kind)


async def test_what_is_used_is_shared_given_back_and_told_to_those_who_have_not_heard(store):
    shared = store()
    at, (first,), _ = await shared.sync_usage("g1", [Use("a", "tokens", 900.0, 60)], {"a": 2}, 0.0)
    assert (first.used, first.age_s) == (900, 0)
    again, (second,), elsewhere = await shared.sync_usage("g2", [Use("a", "tokens", -500.0, 60)], {}, at)
    assert second.used == pytest.approx(400, abs=2)
    assert elsewhere == {"a": 2}
    assert (await shared.sync_usage("g1", [], {}, again + 1))[1:] == ([], {})


async def test_exchanges_at_once_lose_nothing(store):
    several = [store() for _ in range(4)]
    use = Use("a", "requests", 1.0, 1)
    exchanges = (each.sync_usage(f"g{number}", [use], {}, 0.0) for number, each in enumerate(several) for _ in range(25))
    await asyncio.gather(*exchanges)
    assert await used(several[0]) == pytest.approx(100, abs=1)


class Slow(SharedCounters):
    """Each exchange waits until it is released, and then fails if it is `broken`."""

    def __init__(self, path):
        super().__init__(path)
        self.released, self.broken, self.begun = asyncio.Event(), False, 0

    async def sync_usage(self, *given):
        self.begun += 1
        shared = None if self.broken else await super().sync_usage(*given)
        await self.released.wait()
        if self.broken:
            raise sqlite3.OperationalError("no")
        return shared


async def test_a_store_that_fails_leaves_each_to_itself(store, caplog):
    slow, other = store(Slow), store()
    slow.broken = True
    slow.released.set()
    quotas = Quotas("g1", slow)
    await quotas.start()
    with contextlib.ExitStack() as requests:
        for _ in range(3):
            requests.enter_context(quotas.counted(CALLER))
        with pytest.raises(RateLimited, match="concurrent"):
            requests.enter_context(quotas.counted(CALLER))
        while slow.begun < 3:
            await asyncio.sleep(0.01)
    assert len([each for each in caplog.records if "not shared" in each.message]) == 1
    slow.broken = False
    while (await used(other) or 0) < 2.5:
        await asyncio.sleep(0.01)
    await quotas.close()


async def test_a_gateway_knows_from_its_start_what_others_count(store):
    first, second = (Quotas(f"g{number}", store()) for number in range(2))
    await first.start()
    with first.counted(CALLER), first.counted(CALLER):
        await first.close()
    await second.start()
    assert left(second) == 3
    with second.counted(CALLER), pytest.raises(RateLimited, match="concurrent"), second.counted(CALLER):
        pass
    await second.close()


async def test_the_end_counts_nothing_twice(store):
    slow, other = store(Slow), store()
    quotas = Quotas("g1", slow)
    slow.released.set()
    await quotas.start()
    with quotas.counted(CALLER):
        pass
    slow.released.clear()
    while slow.begun < 2:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(quotas.close())
    await asyncio.sleep(0)
    slow.released.set()
    await closing
    assert await used(other) == pytest.approx(1, abs=0.5)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "quotas.sqlite").write_text("no database" * 100)
    with pytest.raises(OSError, match="quotas"):
        SharedCounters(tmp_path / "quotas.sqlite")
