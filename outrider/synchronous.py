"""`Fleet`: `AsyncFleet` for callers without an event loop.  Called in the caller's thread; another thread runs the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from outrider.asynchronous import AsyncFleet, Prompt, Step
from outrider.types import Episode, Sample

T = TypeVar("T")


class Fleet:
    """A fleet to generate with.  `with` stops a fleet that it has started.  Arguments and errors are those of `AsyncFleet`."""

    def __init__(self, model: str | None = None, drafter: str | None = None, **settings: Any) -> None:
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
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # Has an effect only after Ctrl-C: otherwise the work is done.

    def _follow(self, results: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> tuple[T, ...]:
            async for each in results:
                return (each,)
            return ()

        async def close() -> None:
            # A generator that Ctrl-C has cancelled ends by itself.
            with contextlib.suppress(RuntimeError):
                await results.aclose()

        try:
            while found := self._run(following()):
                yield found[0]
        finally:
            self._run(close())

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: object = None, n: int | None = None
    ) -> Generator[Sample, None, None]:
        """`n` samples of each prompt, as they finish.  The first `next` starts all; closing the generator cancels the rest."""
        return self._follow(self._fleet.generate(prompts, sampling_params, n))

    def episodes(
        self, starts: Sequence[Prompt], step: Step, sampling_params: object = None, n: int | None = None
    ) -> Generator[Episode, None, None]:
        """`n` conversations from each start, as they finish.  `step` runs in threads, or on the loop if it is a coroutine."""
        return self._follow(self._fleet.episodes(starts, step, sampling_params, n))

    def submit(self, prompt: Prompt, sampling_params: object = None, n: int | None = None) -> int:
        """Starts `n` samples of one prompt.  Returns an id for `poll`, `wait` and `cancel`."""
        return self._run(self._fleet.submit(prompt, sampling_params, n))

    def poll(self, number: int) -> list[Sample] | None:
        """The samples in order when all have finished; None before."""
        return self._run(self._fleet.poll(number))

    def wait(self, number: int) -> list[Sample]:
        """As `poll`, but waits for the samples."""
        return self._run(self._fleet.wait(number))

    def cancel(self, number: int) -> None:
        """Ends samples that `submit` has started."""
        self._run(self._fleet.cancel(number))

    def update_weights(self, weights: Mapping[str, Any] | str | Path, version: str | int | None = None) -> str:
        """Loads new weights of the target, from a directory that every verifier can read or a state dict of torch tensors."""
        return self._run(self._fleet.update_weights(weights, version))

    def pause(self, mode: str = "keep") -> None:
        """Pauses verifiers: new requests wait; running ones stand still (`keep`), end (`abort`) or finish first (`wait`)."""
        self._run(self._fleet.pause(mode))

    def resume(self) -> None:
        """Ends a pause."""
        self._run(self._fleet.resume())

    def stats(self) -> Any:
        """The answer of `GET /fleet`: members, their load, and acceptance lengths."""
        return self._run(self._fleet.stats())
