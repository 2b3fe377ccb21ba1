"""Answers that are built in a thread: with many log probabilities, building would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any


class Deferred:
    """An answer yet to be built: call `make` in a thread.  The answer may be an error object."""

    def __init__(self, make: Callable[[], Any], results: list[Any]) -> None:
        self._make, self._results = make, results

    def make(self) -> Any:
        """Builds the answer, and empties the log probabilities of vLLM's results.  Raises what vLLM raises."""
        answer = self._make()
        for output in (output for result in self._results for output in result.outputs):
            discard(output.logprobs)
        return answer


async def deferred(results: AsyncIterator[Any], answer: Callable[[AsyncGenerator[Any, None]], Any]) -> Deferred:
    """A `Deferred` that applies vLLM's `answer` to the last of `results`, which has the whole output."""
    last = [result async for result in results][-1:]

    async def again() -> AsyncGenerator[Any, None]:
        for result in last:
            yield result

    return Deferred(lambda: asyncio.run(answer(again())), last)


def discard(values: Any) -> None:
    """Empties a list piece by piece: freeing a hundred thousand objects at once would block the interpreter."""
    while isinstance(values, list) and values:
        del values[-16:]
