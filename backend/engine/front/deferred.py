"""Answers that are built in a thread: with many log probabilities, building would hold up the event loop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse
from vllm.utils.async_utils import merge_async_iterators

WHOLE_BYTES = 1 << 20
"""Largest answer, or part of one, that is sent at once."""


class Deferred:
    """An answer yet to be built: call `make` in a thread.  The answer may be an error object."""

    def __init__(self, make: Callable[[], Any], results: list[Any]) -> None:
        self._make, self._results = make, results

    def make(self) -> Any:
        """Builds the answer, and empties the log probabilities of vLLM's results.  Raises what vLLM raises."""
        answer = self._make()
        for result in self._results:
            for each in (result.prompt_logprobs, *(output.logprobs for output in result.outputs)):
                discard(each)
        return answer


async def deferred(results: Sequence[AsyncIterator[Any]], answer: Callable[..., Any]) -> Deferred:
    """A `Deferred` that applies vLLM's `answer` to the last of each of `results`, which has the whole output."""
    last: dict[int, Any] = {}
    async for index, result in merge_async_iterators(*results):
        last[index] = result

    async def again(index: int) -> AsyncGenerator[Any, None]:
        if index in last:
            yield last[index]

    return Deferred(lambda: asyncio.run(answer(*map(again, range(len(results))))), list(last.values()))


def in_turns(body: bytes) -> Response:
    """A JSON answer that is sent piece by piece, if it is large: the event loop would copy hundreds of megabytes at once."""
    if len(body) <= WHOLE_BYTES:
        return Response(body, media_type="application/json")

    async def each() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), WHOLE_BYTES):
            yield body[start : start + WHOLE_BYTES]
            await asyncio.sleep(0)

    return StreamingResponse(each(), media_type="application/json", headers={"content-length": str(len(body))})


def discard(values: Any) -> None:
    """Empties a list piece by piece: freeing a hundred thousand objects at once would block the interpreter."""
    while isinstance(values, list) and values:
        del values[-16:]
