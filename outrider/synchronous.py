"""`Fleet`: `AsyncFleet` for callers without an event loop.  The caller's thread, and one that runs the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from outrider.asynchronous import AsyncFleet
from outrider.types import Sample

T = TypeVar("T")


class Fleet:
    """A fleet to generate with.  `with` ends what was started; every argument and error is `AsyncFleet`'s."""

    def __init__(self, model: str | None = None, drafter: str | None = None, **settings: Any) -> None:
        self._fleet = AsyncFleet(model, drafter, **settings)

    @classmethod
    def join(cls, url: str, *, api_key: str | None = None, **settings: Any) -> Self:
        """A fleet that runs already; it goes on after the block."""
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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def generate(
        self, prompts: Sequence[str] | Sequence[list[int]], sampling_params: object = None, n: int = 1
    ) -> Iterator[Sample]:
        """`n` samples of each prompt, as they finish; closing the iterator cancels the rest."""
        samples = self._fleet.generate(prompts, sampling_params, n)

        async def following() -> Sample | None:
            return await anext(samples, None)

        async def close() -> None:
            await samples.aclose()  # type: ignore[attr-defined]

        try:
            while (sample := self._run(following())) is not None:
                yield sample
        finally:
            self._run(close())

    def submit(self, prompt: str | list[int], sampling_params: object = None, n: int = 1) -> int:
        """Starts `n` samples of one prompt; the id is for `poll` and `cancel`."""
        return self._run(self._fleet.submit(prompt, sampling_params, n))

    def poll(self, number: int) -> list[Sample] | None:
        """The samples once all are there, in order; None until then."""
        return self._run(self._fleet.poll(number))

    def cancel(self, number: int) -> None:
        """Ends what `submit` started."""
        self._run(self._fleet.cancel(number))

    def update_weights(self, weights: Mapping[str, Any] | str | Path) -> None:
        """New weights of the target: a directory that every verifier can read, or a state dict (which needs one host)."""
        self._run(self._fleet.update_weights(weights))

    def pause(self) -> None:
        """Requests wait from here on."""
        self._run(self._fleet.pause())

    def resume(self) -> None:
        """Requests go on."""
        self._run(self._fleet.resume())

    def stats(self) -> Any:
        """`GET /fleet`: members, what they do, and how much is accepted."""
        return self._run(self._fleet.stats())
