"""Several gateway processes on one port: their messages to each other, and how the first process keeps the others running.

Each process listens on the port by itself (SO_REUSEPORT); Linux spreads connections over the processes by a hash of addresses.
Each also answers the other processes on a Unix socket, in a folder that only this user may enter: a connection for each call,
with MessagePack both ways.  One event loop per process.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

import msgspec

from gateway.http.errors import ApiError, Unavailable, checked

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
READY_TIMEOUT_S = 1.0
BACKOFF_S = (0.5, 30.0)
"""Seconds before a process that died is started again: first and longest wait."""
LIVED_S = 60.0
"""After so many seconds of life, the wait is the shortest again."""

Command = Callable[[int, int], Sequence[str]]
"""Makes a process's command line from its number and the port."""
Calls = Mapping[str, Callable[..., Any]]
"""What a process does for the others, by name; functions of MessagePack's types, some of them coroutines."""


class Peers:
    """This process, number `index` of `count`, and the others.  Only the first has a `command`, and starts the others.

    `folder` is where their sockets are; None where there are no others.
    """

    def __init__(
        self,
        folder: Path | None = None,
        index: int = 0,
        count: int = 1,
        *,
        port: int | None = None,
        command: Command | None = None,
    ) -> None:
        self.port = port
        """The port to listen on; None in the first process, which uses the setting."""
        self.index, self.is_first, self.alone = index, index == 0, count == 1
        self._folder = folder
        self._others = [number for number in range(count) if number != index]
        self._command = command
        self._calls: Calls = {}
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._stopping = asyncio.Event()

    async def start(self, calls: Calls, port: int) -> None:
        """Begins to answer the other processes.  The first process also starts them."""
        self._calls = calls
        if self.alone:
            return
        self._server = await asyncio.start_unix_server(self._answer, self._path(self.index))
        if self._command is not None:
            self._keepers = [asyncio.create_task(self._keep(number, port)) for number in self._others]

    def stop(self) -> None:
        """Has the processes that this one started drain.  A second call ends them at once."""
        self._stopping.set()
        for child in self._children.values():
            if child.returncode is None:
                child.terminate()

    async def close(self, patience_s: float) -> None:
        """Waits `patience_s` for the processes that this one started, then kills those left."""
        # A second SIGTERM would cut off requests that they still serve.
        if not self._stopping.is_set():
            self.stop()
        alive = [child for child in self._children.values() if child.returncode is None]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(child.wait() for child in alive)), patience_s)
        for child in alive:
            if child.returncode is None:
                child.kill()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def ready(self) -> bool:
        """Whether all other processes could serve a request now."""
        answers = await self.ask("ready", timeout_s=READY_TIMEOUT_S)
        return len(answers) == len(self._others) and all(answers.values())

    async def tell(self, failed: str, call: str, *arguments: Any) -> None:
        """Makes a call in all other processes, and logs which of them `failed`."""
        done = await self.ask(call, *arguments)
        if behind := [str(number) for number in self._others if number not in done]:
            logger.error("gateway processes that %s: %s", failed, ", ".join(behind))

    async def ask_first(self, call: str) -> Any:
        """What the first process returns, which may be this one.  Raises `Unavailable`."""
        if self.is_first:
            return self._calls[call]()
        answers = await self.ask(call, of=[0])
        if not answers:
            raise Unavailable
        return answers[0]

    async def ask(
        self, call: str, *arguments: Any, timeout_s: float = ASK_TIMEOUT_S, of: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """What the other processes return that carry out a call in time, by process number."""

        async def ask(number: int) -> tuple[int, Any] | None:
            try:
                async with asyncio.timeout(timeout_s):
                    reader, writer = await asyncio.open_unix_connection(self._path(number))
                    with contextlib.closing(writer):
                        writer.write(msgspec.msgpack.encode([call, *arguments]))
                        writer.write_eof()
                        return number, msgspec.msgpack.decode(await reader.read())
            except (OSError, msgspec.DecodeError):
                return None

        return dict(filter(None, await asyncio.gather(*map(ask, self._others if of is None else of))))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries out a call of another process.  A call that fails has no answer."""
        with contextlib.closing(writer), contextlib.suppress(ApiError):
            call, *arguments = msgspec.msgpack.decode(await reader.read())
            done = self._calls[call](*arguments)
            writer.write(msgspec.msgpack.encode(checked(await done if isawaitable(done) else done)))

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"gateway-{index}.sock"

    async def _keep(self, index: int, port: int) -> None:
        """Starts one process, again whenever it has ended."""
        assert self._command is not None
        wait_s, most_s = BACKOFF_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # In a session of its own, because a Ctrl-C in the terminal must reach only the first process.  The child reads the
            # pipe, and so notices when the first process is gone.
            ended: int | OSError
            try:
                child = await asyncio.create_subprocess_exec(
                    *self._command(index, port), stdin=asyncio.subprocess.PIPE, start_new_session=True
                )
                self._children[index] = child
                if self._stopping.is_set():
                    child.terminate()
                ended = await child.wait()
            except OSError as error:
                # For example, too many files are open.
                ended = error
            if self._stopping.is_set():
                return
            if time.monotonic() - began > LIVED_S:
                wait_s = BACKOFF_S[0]
            logger.error("gateway process %d ended with %s; another starts in %g s", index, ended, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)
