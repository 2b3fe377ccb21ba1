"""Answers with many log probabilities, which take too long to put together on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any


class Deferred:
    """An answer that is made by `make`, in a thread; it may be an error object, or raise what vLLM raises."""

    def __init__(self, make: Callable[[], Any], results: list[Any]) -> None:
        self._make, self._results = make, results

    def make(self) -> Any:
        """Puts it together; the log probabilities of vLLM's results are gone then."""
        answer = self._make()
        for output in (output for result in self._results for output in result.outputs):
            discard(output.logprobs)
        return answer


async def deferred(results: AsyncIterator[Any], answer: Callable[[AsyncGenerator[Any, None]], Any]) -> Deferred:
    """What vLLM's `answer` makes of the last of `results`, which is all of them."""
    last = [result async for result in results][-1:]

    async def again() -> AsyncGenerator[Any, None]:
        for result in last:
            yield result

    return Deferred(lambda: asyncio.run(answer(again())), last)


def discard(values: Any) -> None:
    """Empties a list piece by piece: to free a hundred thousand objects at once holds the interpreter for long."""
    while isinstance(values, list) and values:
        del values[-16:]
