"""A background response's events on their way to a client: the end, an error, and a client that leaves."""

import asyncio
import json
import sqlite3
from typing import Any

import pytest

from gateway.routes.responses import _follow

EVENT = json.dumps({"type": "response.completed"})


class Followed:
    """A gateway with one response, whose events are told; then comes an error, silence, or the end."""

    def __init__(self, error: Exception | None = None, silent: bool = False) -> None:
        self.error, self.silent, self.left = error, silent, 0
        self.responses = self.metrics = self

    def client_left(self) -> None:
        self.left += 1

    async def follow(self, response_id: str, after: int) -> Any:
        yield EVENT
        if self.error is not None:
            raise self.error
        if self.silent:
            await asyncio.Event().wait()


async def written(followed: Followed) -> bytes:
    """What is sent.  The connection counts as closed after the last message, or, of a silent source, after the first event."""
    closed, sent = asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        await closed.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if message["type"] == "http.response.body" and (followed.silent or not message["more_body"]):
            closed.set()
            for _ in range(5):
                await asyncio.sleep(0)

    gateway: Any = followed
    await asyncio.wait_for(_follow(gateway, "r", -1)({"type": "http", "method": "GET"}, receive, send), 120)
    return b"".join(sent)


async def test_a_stream_that_ends_is_no_client_that_left() -> None:
    followed = Followed()
    assert await written(followed) == f"event: response.completed\ndata: {EVENT}\n\n".encode()
    assert followed.left == 0


async def test_a_client_that_leaves_is_counted() -> None:
    followed = Followed(silent=True)
    await written(followed)
    assert followed.left == 1


async def test_a_failing_source_ends_the_stream_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(sqlite3.OperationalError("secret"))
    text = await written(followed)
    assert b"event: error\ndata: " in text
    assert b"secret" not in text
    assert "OperationalError" in caplog.text
    assert followed.left == 0
