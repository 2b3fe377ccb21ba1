"""A gateway in front of a fake verifier, one for all tests of a file that take its ordinary settings."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.running_gateway import Running, running_gateway


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a module's engines; short, as sockets lie in it."""
    return tmp_path_factory.mktemp("e")


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def running(gateway: Running) -> AsyncIterator[Running]:
    """The file's gateway as if it were new, except for its metrics; of a test's requests nothing may be left in it."""
    gateway.verifier.renew()
    yield gateway
    await gateway.leave()
    await gateway.until_idle()


@pytest.fixture
async def elapse() -> Callable[[float], Awaitable[None]]:
    """Sets the clock of the test's event loop forward by seconds, and lets the timers run that are due then.

    The clock is not set back: what a file's gateway does from time to time would then pause.
    """
    loop = asyncio.get_running_loop()

    async def forward(seconds: float) -> None:
        ahead = loop.time() - time.monotonic() + seconds
        loop.time = lambda: time.monotonic() + ahead  # type: ignore[method-assign]
        for _ in range(5):
            await asyncio.sleep(0)

    return forward
