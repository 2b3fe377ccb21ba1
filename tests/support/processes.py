"""Starts verifiers and drafters in processes of their own, for fixtures.  Tests only.

They are forked from one process that has already imported what they need, so an engine starts in a few seconds.
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

from vllm.sampling_params import SamplingParams

from backend.engine.client import Answer, EngineClient
from backend.fleet import DrafterRef
from backend.lab.bench.load import APART
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


def demo_models() -> ResolvedModels:
    return ResolvedModels(str(TARGET_DIR), str(DRAFTER_DIR), "eagle", "demo")


Main = Callable[[dict[str, Any], Connection], None]
"""The main function of a child: sends its address when it is ready, handles messages, and ends when the pipe closes."""

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.preload"])
_environment = threading.Lock()
"""Guards `os.environ`, which all threads share, because children are started from several threads."""


def start_fork_server() -> None:
    """Starts the process that all children are forked from, unless it runs; it imports `tests.support.preload`."""
    with _environment, mock.patch.dict(os.environ, ENGINE_ENV):
        forkserver.ensure_running()


class Child:
    """Runs the main function of a helper module in a child process, which ends with a `with` block at the latest.

    The constructor waits until it is ready.
    """

    def __init__(self, main: Main, job: dict[str, Any], directory: Path) -> None:
        name = main.__module__.rpartition(".")[2]
        self._log = directory / f"{name}-{os.urandom(3).hex()}.log"
        self._pipe, theirs = _forks.Pipe()
        # `multiprocessing` waits at exit for children that no fixture has closed; closing the pipe ends them.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, message: Any) -> None:
        self._pipe.send(message)

    def hear(self) -> Any:
        return self._pipe.recv()

    def close(self) -> None:
        """Closes the child's pipe and waits for its end; kills it after 30 s."""
        if self._pipe.closed:
            return
        self._pipe.close()
        self.process.join(30)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        if self.process.exitcode not in (0, -signal.SIGKILL):
            # pytest shows printed output with a failing test.
            print(f"{self.process.name} ended with {self.process.exitcode}:\n{self._log.read_text()[-6000:]}")


def _run(main: Main, job: dict[str, Any], pipe: Connection, log: Path) -> None:
    """Runs in the child: redirects its output to the log, then calls `main`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(job, pipe)


class Apart(EngineClient):
    """A client whose requests share no text unless a test says so: the first answer to a prompt would draft for the second."""

    def add(self, *given: Any, **fields: Any) -> str:
        fields["options"] = fields.get("options") or APART
        return super().add(*given, **fields)

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams], **fields: Any
    ) -> list[Answer]:
        """Sends all prompts at once; returns their answers in the same order."""
        (answers,) = generate_on([self], prompts, params, **fields)
        return answers


class Verifier(Child):
    """A running verifier and a client of it."""

    def __init__(
        self,
        directory: Path,
        settings: dict[str, Any],
        paths: ResolvedModels | None = None,
        token_s: float | None = None,
        deadline_s: float = 2.0,
    ) -> None:
        """`token_s`: how long a token of a step takes, of the times by which drafts are decided (`steady.py`).

        `deadline_s`: the longest wait for drafts, which may take long on a busy machine.
        """
        address = f"ipc://{directory}/v{os.urandom(3).hex()}.sock"
        # The name must be unique: drafters identify verifiers by name, and a second of that name would replace the first.
        self.name = f"verifier-{os.urandom(3).hex()}"
        job = {"verifier_id": self.name, "settings": settings, "paths": paths or demo_models(), "address": address}
        job |= {"token_s": token_s, "deadline_s": deadline_s}
        super().__init__(run_verifier.main, job, directory)
        self.client = Apart(self.address)

    def set_drafters(self, *refs: DrafterRef) -> int:
        """Assigns these drafters; requests that are sent afterwards are theirs from the first step.

        Returns how many steps have begun early so far.
        """
        self.tell(list(refs))
        return int(self.hear())

    def close(self) -> None:
        if not self._pipe.closed:
            self.client.close()
        super().close()


@contextmanager
def together(*starts: Callable[[], Any]) -> Iterator[list[Any]]:
    """The children that these functions start, for a `with` block; two start or end at a time, as there are two cores."""
    with ThreadPoolExecutor(2) as pool:
        children = list(pool.map(lambda start: start(), starts))
        try:
            yield children
        finally:
            list(pool.map(lambda child: child.close(), children))


def generate_on(clients: Sequence[Apart], prompts: Sequence[list[int]], params: Any, **fields: Any) -> list[list[Answer]]:
    """Sends all prompts to the verifier of each client, which work at the same time; returns the answers by verifier.

    `params` is one `SamplingParams`, or a list with one for each prompt.
    """
    each = params if isinstance(params, list) else [params] * len(prompts)
    pairs = list(zip(prompts, each, strict=True))
    sent = [[client.add(prompt, mine, **fields) for prompt, mine in pairs] for client in clients]
    for client in clients:
        client.finish_all()
    return [[client.answers.pop(i) for i in ids] for client, ids in zip(clients, sent, strict=True)]


class Drafter(Child):
    """A running drafter, with the fleet's head or the draft model in the directory `draft_model`."""

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
