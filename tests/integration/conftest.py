"""A gateway in front of a fake verifier, one for all tests of a file that take its ordinary settings."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fake_verifier import eventually
from tests.support.running_gateway import Running, running_gateway


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def running(gateway: Running) -> AsyncIterator[Running]:
    """The file's gateway as if it were new, except for its metrics; a test may leave no request in it."""
    gateway.verifier.renew()
    yield gateway
    await eventually(lambda: gateway.idle and gateway.server.gateway.metrics.in_flight == 0)
