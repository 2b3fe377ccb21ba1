"""The event loop's DEALER (`backend/transport/aio.py`) against a ROUTER on a thread of its own."""

import asyncio
import threading

import pytest
import zmq

from backend.transport.aio import AsyncDealer
from backend.transport.sockets import Wire


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.close()


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


async def test_messages_come_in_order_whoever_is_faster(wire, address):
    thread = echo(wire, address, 50, times=2)
    dealer = AsyncDealer(wire, address)
    for number in range(50):
        dealer.send([b"%d" % number, b"rest"])
        if number % 7 == 0:
            await asyncio.sleep(0)
    heard = [await asyncio.wait_for(dealer.receive(), 120) for _ in range(100)]
    assert heard == [[b"%d" % (number // 2), b"rest"] for number in range(100)]
    await asyncio.to_thread(thread.join)
    dealer.close()


async def test_what_the_queue_does_not_take_is_sent_later(wire, address):
    dealer = AsyncDealer(wire, address, high_water_mark=2)
    for number in range(40):
        dealer.send([b"%d" % number])
    thread = echo(wire, address, 40)
    heard = [await asyncio.wait_for(dealer.receive(), 120) for _ in range(40)]
    assert heard == [[b"%d" % number] for number in range(40)]
    await asyncio.to_thread(thread.join)
    dealer.close()


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


async def test_a_peer_that_goes_is_noticed(wire, address):
    thread = echo(wire, address, 1)
    dealer = AsyncDealer(wire, address)
    gone = asyncio.ensure_future(dealer.disconnected())
    dealer.send([b"hello"])
    assert await asyncio.wait_for(dealer.receive(), 120) == [b"hello"]
    await asyncio.to_thread(thread.join)
    await asyncio.wait_for(gone, 120)
    dealer.close()
    dealer.close()
    dealer.send([b"nobody listens"])
