"""`Fleet`: `AsyncFleet` for callers without an event loop.  Called in the caller's thread; another thread runs the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from outrider.asynchronous import AsyncFleet

T = TypeVar("T")
P = ParamSpec("P")


def _called(method: Callable[Concatenate[AsyncFleet, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Fleet, P], T]:
    """A method that runs `method` on the fleet's loop and returns its result."""

    @wraps(method)
    def call(self: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._fleet, *args, **kwargs))

    return call


def _iterated(
    method: Callable[Concatenate[AsyncFleet, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Fleet, P], Generator[T, None, None]]:
    """A method whose generator takes what `method` yields on the fleet's loop.  Nothing runs before its first `next`."""

    @wraps(method)
    def iterate(self: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._follow(method(self._fleet, *args, **kwargs))

    return iterate


class Fleet:
    """A fleet to generate with.  `with` stops a fleet that it has started.

    Methods, arguments and errors are those of `AsyncFleet`; methods block, and generators are plain ones.
    """

    def __init__(self, model: str | Path | None = None, drafter: str | Path | None = None, **settings: Any) -> None:
        self._fleet = AsyncFleet(model, drafter, **settings)

    @classmethod
    def join(cls, url: str, *, api_key: str | None = None, **settings: Any) -> Self:
        """A fleet that runs already, and goes on after the block."""
        fleet = cls.__new__(cls)
        fleet._fleet = AsyncFleet.join(url, api_key=api_key, **settings)
        return fleet

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider", daemon=True)
        self._thread.start()
        try:
            self._run(self._fleet.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._fleet.__aexit__())
        finally:
            self._end()

    def _end(self) -> None:
        async def settle() -> None:
            # If Ctrl-C has interrupted the start, its task still has to stop the fleet.
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*rest, return_exceptions=True)

        self._run(settle())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            work.close()
            raise RuntimeError(
                "this fleet cannot be used here: an `async` step needs an AsyncFleet, and a process needs a Fleet of its own, "
                "joined after it was forked"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # Has an effect only after Ctrl-C: otherwise the work is done.

    def _follow(self, results: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def close() -> None:
            # A generator that Ctrl-C has cancelled ends by itself.
            with contextlib.suppress(RuntimeError):
                await results.aclose()

        try:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    yield self._run(results.__anext__())
        finally:
            # In the loop's own thread it is the garbage collector that ends both generators, and waiting would stop the loop.
            if threading.current_thread() is not self._thread:
                self._run(close())

    @property
    def url(self) -> str:
        """As of `AsyncFleet`."""
        return self._fleet.url

    generate = _iterated(AsyncFleet.generate)
    episodes = _iterated(AsyncFleet.episodes)
    submit = _called(AsyncFleet.submit)
    poll = _called(AsyncFleet.poll)
    wait = _called(AsyncFleet.wait)
    cancel = _called(AsyncFleet.cancel)
    update_weights = _called(AsyncFleet.update_weights)
    load_adapter = _called(AsyncFleet.load_adapter)
    sleep = _called(AsyncFleet.sleep)
    wake_up = _called(AsyncFleet.wake_up)
    pause = _called(AsyncFleet.pause)
    resume = _called(AsyncFleet.resume)
    stats = _called(AsyncFleet.stats)
