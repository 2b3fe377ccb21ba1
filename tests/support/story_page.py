"""Serves the fleet page of a `Story` from a thread of its own, for tests with a browser or HTTP client.  Tests only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from gateway.http.protocol import BoundedProtocol
from gateway.http.server import _listen
from tests.support.fleet_story import Story, page_app


class Served:
    """The page's server.  `do` runs a function in the server's event loop and waits for its result."""

    def __init__(self, story: Story, port: int, api_key: str | None) -> None:
        self.story = story
        self._listener = _listen("127.0.0.1", port)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(page_app(story, api_key), http=BoundedProtocol, log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._listener])
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def do(self, work: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def advance(self, seconds: float = 1.0, times: int = 1) -> None:
        """Advances the story `times` times."""

        def work() -> None:
            for _ in range(times):
                self.story.advance(seconds)

        self.do(work)

    def stop(self) -> None:
        def work() -> None:
            self._server.should_exit = True

        self.do(work)
        self._thread.join(10)
        self._listener.close()
        self._loop.close()


@contextmanager
def served(story: Story, port: int = 0, api_key: str | None = None) -> Iterator[Served]:
    """Serves the page of `story` for a `with` block."""
    page = Served(story, port, api_key)
    try:
        yield page
    finally:
        page.stop()
