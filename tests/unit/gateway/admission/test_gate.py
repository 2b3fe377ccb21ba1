"""Requests wait at the gate for room that a test sets."""

import asyncio

import pytest

from gateway.admission.claim import Claim
from gateway.admission.gate import Gate
from gateway.http.errors import Overloaded, ShuttingDown


class Held:
    """A gate whose room a test sets."""

    def __init__(self, max_sequences=1024, wait_s=60.0):
        self.room = 0.0
        self.paused = False
        self.gate = Gate(lambda: self.room, max_sequences, wait_s, lambda: self.paused)

    def enter(self, **fields):
        claim = Claim(**fields)
        return claim, asyncio.ensure_future(self.gate.enter(claim))


async def test_a_pause_is_waited_for_unless_less_is_asked_for():
    held = Held(wait_s=0.02)
    held.paused = True
    # As `admit` sets it for a request without a wait of its own.
    claim, waiting = held.enter(wait_s=0.02)
    _, hurried = held.enter(wait_s=0.01)
    with pytest.raises(Overloaded):
        await hurried
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done(), "it has waited five times as long as otherwise"
    held.paused = False
    with pytest.raises(Overloaded):
        await waiting
    assert claim.retry_after_s


async def test_nothing_stays_of_who_leaves_or_is_told_to():
    held = Held()
    _, leaving = held.enter()
    _, staying = held.enter()
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert held.gate.sequences == 1
    held.gate.fail_all(ShuttingDown)
    with pytest.raises(ShuttingDown):
        await staying
    assert (held.gate.sequences, held.gate.tokens) == (0, 0)
