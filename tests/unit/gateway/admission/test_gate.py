"""Requests wait at the gate, where there is no room."""

import asyncio

import pytest

from gateway.admission.claim import Claim
from gateway.admission.gate import Gate
from gateway.http.errors import Overloaded, ShuttingDown


async def test_a_pause_is_waited_for_unless_less_is_asked_for_and_nothing_stays_of_who_leaves_or_is_told_to():
    paused = True
    gate = Gate(lambda: 0.0, 1024, 0.02, lambda: paused)
    # As `admit` sets it for a request without a wait of its own.
    claim = Claim(wait_s=0.02)
    waiting, hurried, leaving = (asyncio.ensure_future(gate.enter(each)) for each in (claim, Claim(wait_s=0.01), Claim()))
    with pytest.raises(Overloaded):
        await hurried
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done(), "it has waited five times as long as otherwise"
    leaving.cancel()
    await asyncio.wait([leaving])
    assert gate.sequences == 1
    paused = False
    with pytest.raises(Overloaded):
        await waiting
    assert claim.retry_after_s
    told = asyncio.ensure_future(gate.enter(Claim(wait_s=60.0)))
    await asyncio.sleep(0)
    gate.fail_all(ShuttingDown)
    with pytest.raises(ShuttingDown):
        await told
    assert (gate.sequences, gate.tokens) == (0, 0)
