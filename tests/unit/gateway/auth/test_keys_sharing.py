"""Gateways that share counts through a SQLite file."""

import asyncio
import contextlib
import sqlite3

import pytest

from gateway.auth.caller import Caller, KeyLimits
from gateway.auth.quota import Use
from gateway.auth.quotas import Quotas
from gateway.auth.sharing import SharedCounters
from gateway.http.errors import RateLimited

CALLER = Caller("team", "team", limits=KeyLimits(5, 1000, 3))


@pytest.fixture
def store(tmp_path):
    """Makes stores over one and the same place."""
    with contextlib.ExitStack() as opened:

        def made(kind=SharedCounters, *given):
            return opened.enter_context(contextlib.closing(kind(tmp_path / "quotas.sqlite", *given)))

        yield made


async def admitted(quotas, count):
    taken = 0
    for _ in range(count):
        with contextlib.suppress(RateLimited):
            await quotas.begin(CALLER)
            taken += 1
    return taken


async def test_tokens_are_shared_and_given_back(store):
    shared = store()
    first = (await shared.exchange("g1", [Use("a", 0, 900.0, 0, 0, 60)]))["a"]
    assert first.tokens == pytest.approx(900, abs=2)
    second = (await shared.exchange("g2", [Use("a", 0, -500.0, 1, 0, 60)]))["a"]
    assert second.tokens == pytest.approx(400, abs=2)
    third = (await shared.exchange("g1", [Use("a", 0, 0.0, 0, 0, 60)]))["a"]
    assert (third.open_elsewhere, second.open_elsewhere) == (1, 0)


async def test_exchanges_at_once_lose_nothing(store):
    several = [store() for _ in range(4)]
    await asyncio.gather(
        *(each.exchange(f"g{number}", [Use("a", 1.0, 0.0, 0, 0, 0)]) for number, each in enumerate(several) for _ in range(25))
    )
    total = (await several[0].exchange("g0", [Use("a", 0.0, 0.0, 0, 0, 0)]))["a"]
    assert total.requests == 100


class Slow(SharedCounters):
    """Each exchange waits until it is released, and then fails if it is `broken`."""

    def __init__(self, path, broken=False):
        super().__init__(path)
        self.released, self.broken, self.begun = asyncio.Event(), broken, 0

    async def exchange(self, gateway, uses):
        self.begun += 1
        shared = {} if self.broken else await super().exchange(gateway, uses)
        await self.released.wait()
        if self.broken:
            raise sqlite3.OperationalError("no")
        return shared


async def test_a_store_that_fails_leaves_each_to_itself(store, caplog):
    slow, other = store(Slow, True), store()
    slow.released.set()
    quotas = Quotas("g1", slow)
    assert await admitted(quotas, 4) == 3
    assert len([each for each in caplog.records if "not shared" in each.message]) == 1
    slow.broken = False
    quotas.start()
    while (await other.exchange("g2", [Use("team", 0, 0, 0, 0, 0)]))["team"].requests < 2.5:
        await asyncio.sleep(0.01)
    await quotas.close()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_burst_of_an_idle_key_waits_for_one_exchange(store, broken):
    slow = store(Slow, broken)
    quotas = Quotas("g1", slow)
    burst = [asyncio.create_task(quotas.begin(CALLER)) for _ in range(3)]
    while not slow.begun:
        await asyncio.sleep(0)
    slow.released.set()
    await asyncio.gather(*burst)
    assert slow.begun == 1
    await quotas.close()


async def test_the_end_counts_nothing_twice(store):
    slow, other = store(Slow), store()
    quotas = Quotas("g1", slow)
    slow.released.set()
    await quotas.begin(CALLER)
    slow.released.clear()
    quotas.start()
    while slow.begun < 2:
        await asyncio.sleep(0.01)
    closing = asyncio.create_task(quotas.close())
    await asyncio.sleep(0)
    slow.released.set()
    await closing
    assert (await other.exchange("g2", [Use("team", 0, 0, 0, 0, 0)]))["team"].requests == pytest.approx(1, abs=0.5)


def test_a_file_that_is_no_database_is_named(tmp_path):
    (tmp_path / "quotas.sqlite").write_text("no database" * 100)
    with pytest.raises(OSError, match="quotas"):
        SharedCounters(tmp_path / "quotas.sqlite")
