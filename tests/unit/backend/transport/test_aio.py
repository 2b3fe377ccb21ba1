"""The event loop's DEALER (`backend/transport/aio.py`) against a ROUTER on a thread of its own."""

import asyncio
import threading
from contextlib import closing

import pytest
import zmq

from backend.transport.aio import AsyncDealer
from backend.transport.sockets import Wire


@pytest.fixture
def wire():
    with closing(Wire()) as wire:
        yield wire


@pytest.fixture
def address(tmp_path) -> str:
    return f"ipc://{tmp_path}/router.sock"


def echo(wire: Wire, address: str, messages: int, times: int = 1) -> threading.Thread:
    """A ROUTER that answers so many messages, each so often, and goes away."""

    def run() -> None:
        router = wire.context.socket(zmq.ROUTER)
        router.bind(address)
        for _ in range(messages):
            frames = router.recv_multipart()
            for _ in range(times):
                router.send_multipart(frames)
        router.close(linger=1000)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


async def test_messages_come_in_order_also_those_that_the_queue_does_not_take_until_the_peer_goes(wire, address):
    dealer = AsyncDealer(wire, address, high_water_mark=2)
    gone = asyncio.ensure_future(dealer.disconnected())
    for number in range(50):
        if number == 25:
            thread = echo(wire, address, 50, times=2)
        dealer.send([b"%d" % number, b"rest"])
        if number % 7 == 0:
            await asyncio.sleep(0)
    heard = [await asyncio.wait_for(dealer.receive(), 120) for _ in range(100)]
    assert heard == [[b"%d" % (number // 2), b"rest"] for number in range(100)]
    await asyncio.to_thread(thread.join)
    await asyncio.wait_for(gone, 120)
    dealer.close()
    dealer.close()
    dealer.send([b"nobody listens"])


async def test_others_get_their_turn_while_messages_keep_coming(wire, address):
    thread = echo(wire, address, 1, times=500)
    dealer = AsyncDealer(wire, address)
    dealer.send([b"hello"])
    await asyncio.to_thread(thread.join)  # all 500 are on their way
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async with asyncio.timeout(120):
        for _ in range(500):
            await dealer.receive()
    task.cancel()
    dealer.close()
    assert turns > 250
