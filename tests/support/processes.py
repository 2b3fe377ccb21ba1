"""Verifiers and drafters in processes of their own, as fixtures use them.  Tests only.

They are forked from one process that has imported what they need: an engine is up in a few seconds.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from backend.engine.client import Answer, EngineClient
from backend.fleet import DrafterRef
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels
from tests.support import run_drafter, run_verifier

ROOT = Path(__file__).resolve().parents[2]
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def demo_models(kind: str = "eagle") -> ResolvedModels:
    """The models that ship with the project."""
    return ResolvedModels(str(TARGET_DIR), str(DRAFTER_DIR) if kind == "eagle" else None, kind, "demo")  # type: ignore[arg-type]


Main = Callable[[dict[str, Any], Connection], None]
"""What a child does with its job: it sends its address when it is ready, takes messages, and ends when there are no more."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.preload"])
_environment = threading.Lock()
"""Children are started from several threads, and the environment is this whole process's."""


def start_fork_server() -> None:
    """Starts the process that all children are forked from, unless it runs; it begins to import what engines import."""
    with _environment, mock.patch.dict(os.environ, ENGINE_ENV):
        forkserver.ensure_running()


class Child:
    """A function of a helper module in a process of its own, which says when it is ready."""

    def __init__(self, main: Main, job: dict[str, Any], directory: Path) -> None:
        name = main.__module__.rpartition(".")[2]
        self._log = directory / f"{name}-{os.urandom(3).hex()}.log"
        self._pipe, theirs = _forks.Pipe()
        # At the end of the tests `multiprocessing` waits for children that a fixture forgot.
        atexit.register(self._pipe.close)
        start_fork_server()
        self.process = _forks.Process(target=_run, args=(main, job, theirs, self._log), name=name)
        self.process.start()
        theirs.close()
        try:
            self.address: str = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"{name} did not start:\n{self._log.read_text()[-3000:]}") from None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, message: Any) -> None:
        """One message to the child."""
        self._pipe.send(message)

    def hear(self) -> Any:
        """The child's next message."""
        return self._pipe.recv()

    def close(self) -> None:
        """Ends its input and waits for it to stop."""
        self._pipe.close()
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        if self.process.exitcode not in (0, -signal.SIGKILL):
            # Shown with the test that fails for it.
            print(f"{self.process.name} ended with {self.process.exitcode}:\n{self._log.read_text()[-6000:]}")


def _run(main: Main, job: dict[str, Any], pipe: Connection, log: Path) -> None:
    """In the child: what it prints goes to its log."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(job, pipe)


class Verifier(Child):
    """A running verifier and a client of it."""

    def __init__(self, directory: Path, settings: dict[str, Any], paths: ResolvedModels | None = None) -> None:
        # The test's client pings only while it waits.
        settings = settings | {"verifier": {"gateway_lease_s": 3600} | settings.get("verifier", {})}
        address = f"ipc://{directory}/v{os.urandom(3).hex()}.sock"
        # Drafters know a verifier by its name: two of one name would take each other's place.
        self.name = f"verifier-{os.urandom(3).hex()}"
        job = {"verifier_id": self.name, "settings": settings, "paths": paths or demo_models(), "address": address}
        super().__init__(run_verifier.main, job, directory)
        self.client = EngineClient(self.address)

    def set_drafters(self, *refs: DrafterRef) -> None:
        self.tell(list(refs))

    def close(self) -> None:
        if not self._pipe.closed:
            self.client.close()
            super().close()


def together(*starts: Callable[[], Any]) -> list[Any]:
    """What the given functions return; two of them, as there are cores, start something at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda start: start(), starts))


def generate_on(verifiers: Sequence[Verifier], prompts: Sequence[list[int]], params: Any, **fields: Any) -> list[list[Answer]]:
    """The prompts' answers by each of the verifiers, which work at the same time.

    `params` are `SamplingParams`, or a list with those of each prompt.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    pairs = list(zip(prompts, each, strict=True))
    asked = [[verifier.client.add(prompt, mine, **fields) for prompt, mine in pairs] for verifier in verifiers]
    for verifier in verifiers:
        verifier.client.finish_all()
    return [[verifier.client.answers.pop(i) for i in ids] for verifier, ids in zip(verifiers, asked, strict=True)]


class Drafter(Child):
    """A running drafter; `draft_model` is the directory of one that it has instead of the fleet's head."""

    def __init__(
        self,
        directory: Path,
        paths: ResolvedModels | None = None,
        draft_model: str | None = None,
        name: str = "drafter-0",
        **settings: Any,
    ) -> None:
        address = f"ipc://{directory}/d{os.urandom(3).hex()}.sock"
        job = {"paths": paths or demo_models(), "address": address, "settings": settings, "own": draft_model}
        super().__init__(run_drafter.main, job, directory)
        own, incarnation = draft_model or "", os.urandom(4).hex()
        self.ref = DrafterRef(name, incarnation, self.address, "", 1, own, not own)
