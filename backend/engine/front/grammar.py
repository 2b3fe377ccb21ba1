"""Checks structured outputs before a verifier gets them: valid, compilable within limits, matching some text.

vLLM validates in the event loop and compiles in threads that cannot be stopped.  Here both happen in a separate process, which
is killed when it reaches a limit or the client leaves.  `GrammarChecks` runs in the gateway's event loop, `_verdict` in that
process, which is forked from a server that has imported vLLM: a replacement starts fast.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from multiprocessing import forkserver, resource_tracker
from types import SimpleNamespace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams, check_json_nesting
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest

from backend.engine.front.schemas import KEYWORDS, check_least_properties, check_regex, check_schema, schemas_of_tag

WORKERS = 2
"""Checks that run at the same time; further ones wait."""
CPU_LIMIT_S = 5.0
"""Processor time for one check, over all threads.  A schema of a thousand properties takes one second."""
WALL_LIMIT_S = 60.0
"""Wall-clock time for one check; the machine may be busy."""
MEMORY_LIMIT_BYTES = 2 << 30
"""Memory for a check, beyond what its process holds already."""
KEPT = 256
"""Verdicts remembered: clients send the same schema again and again."""
KEPT_CHARS = 1 << 16
"""Characters.  A longer valid grammar is not remembered, but checked each time."""

_TOO_MUCH = "The grammar takes too long, or too much memory, to compile. Make it simpler."
_NOTHING = "The grammar matches no text that this model could write."
_ECHO = re.compile(r" Pattern: .*|\"[^\"]*\"")
"""Where error messages of vLLM and its libraries quote the request."""
constraint_field: ContextVar[str] = ContextVar("constraint_field", default="structured_outputs")
"""The current request's field that holds the grammar, for error messages."""
_forks = multiprocessing.get_context("forkserver")


class GrammarChecks:
    """Checks structured outputs and remembers the verdicts.  The first check, or `warm_up`, starts a process."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._slots = asyncio.Semaphore(WORKERS)
        self._idle: list[_Worker] = []
        self._warming_up: threading.Thread | None = None
        self._verdicts: dict[bytes, StructuredOutputsParams | str] = {}

    async def checked(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """Returns `constraint` as a verifier should get it.  Raises `VLLMValidationError`.  Cancelling ends the check."""
        key = hashlib.sha256(pickle.dumps(constraint)).digest()
        if (verdict := self._verdicts.get(key)) is None:
            async with self._slots:
                # Another sequence of the request may have been checked meanwhile.
                if (verdict := self._verdicts.get(key)) is None:
                    verdict = await self._decide(constraint)
                    if isinstance(verdict, str) or len(repr(verdict)) <= KEPT_CHARS:
                        self._verdicts[key] = verdict
                    if len(self._verdicts) > KEPT:
                        del self._verdicts[next(iter(self._verdicts))]
        if isinstance(verdict, str):
            raise VLLMValidationError(verdict, parameter=constraint_field.get())
        return copy.copy(verdict)

    def warm_up(self) -> None:
        """Starts a process in the background; without it the first check waits for the import of vLLM."""

        def start() -> None:
            # The fork server inherits it: Ctrl-C in a terminal would interrupt its imports, with a traceback.  The tracker
            # runs first, because starting it unblocks the signal.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            # If this fails, the first check fails too and reports why.
            with contextlib.suppress(OSError, EOFError, RuntimeError):
                self._idle.append(_Worker(self._vllm_config))

        # Not in an executor: the gateway's exit would wait for the import.
        self._warming_up = threading.Thread(target=start, name="grammar-start", daemon=True)
        self._warming_up.start()

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()
        # A process that is still being started would look for what this one has taken away, and say so.
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None and self._warming_up is not None and self._warming_up.is_alive():
            _kill(server)

    async def _decide(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams | str:
        worker = self._idle.pop() if self._idle else await asyncio.to_thread(_Worker, self._vllm_config)
        try:
            verdict = await asyncio.get_running_loop().run_in_executor(worker, _verdict, constraint, CPU_LIMIT_S)
        except BrokenProcessPool:
            # The process has reached a limit, or has crashed because of this grammar.
            return _TOO_MUCH
        except BaseException:
            worker.kill()
            raise
        self._idle.append(worker)
        return verdict


class _Worker(ProcessPoolExecutor):
    """An executor with one process, which can be killed."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Forks the process and waits until it is ready: in a thread."""
        _forks.set_forkserver_preload([__name__])
        super().__init__(1, _forks, _prepare, (vllm_config,))
        self._pid = self.submit(os.getpid).result()

    def kill(self) -> None:
        _kill(self._pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _prepare(vllm_config: VllmConfig) -> None:
    """Makes a new process ready for checks."""
    global _check
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process
    # A gateway that is killed ends it, too: the executor's queue would not.
    gateway: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (gateway.join(), os._exit(0)), daemon=True).start()
    # The libraries print patterns and schemas, which must not reach the logs.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    _check = Check(vllm_config)
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))


def _verdict(constraint: StructuredOutputsParams, cpu_limit_s: float) -> StructuredOutputsParams | str:
    """The parameters to send, or an error message.  Ends the process at a limit."""
    # Either signal kills the process, even in the middle of native code.
    signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    try:
        return _check(constraint)
    except MemoryError:
        os._exit(1)
    except Exception as error:
        return _ECHO.sub(_without_echo, (str(error) or _TOO_MUCH).splitlines()[0])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _without_echo(quoted: re.Match[str]) -> str:
    return quoted[0] if quoted[0].strip('"') in KEYWORDS else ""


class Check:
    """Validates and compiles as vLLM does, with a manager per backend, as a manager supports only one."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_config = vllm_config
        self._tokenizer = cached_tokenizer_from_config(model_config=vllm_config.model_config)
        self._managers: dict[str, StructuredOutputManager] = {}

    def __call__(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams | str:
        check_json_nesting(constraint.json)
        check_json_nesting(constraint.structural_tag, structural_tag=True)
        _check_kept(constraint, self._vllm_config.structured_outputs_config.backend == "xgrammar")
        if isinstance(constraint.structural_tag, str):
            for schema in schemas_of_tag(constraint.structural_tag):
                # llguidance compiles them only when the model gets there.
                if isinstance(verdict := self(StructuredOutputsParams(json=schema)), str):
                    return verdict
        params = SamplingParams(structured_outputs=constraint)
        try:
            params._validate_structured_outputs(
                self._vllm_config.model_config, self._vllm_config.structured_outputs_config, self._tokenizer
            )
        except VLLMValidationError as error:
            if constraint.json is not None and "regex" in str(error):
                raise ValueError(f"pattern: {error}") from error
            raise
        backend = constraint._backend or ""
        if backend not in self._managers:
            self._managers[backend] = StructuredOutputManager(self._vllm_config)
        manager = self._managers[backend]
        request: Any = SimpleNamespace(
            request_id="check", sampling_params=params, structured_output_request=StructuredOutputRequest(constraint)
        )
        manager.grammar_init(request)
        grammar = request.structured_output_request._grammar.result()
        if manager.backend is None:
            return constraint
        if isinstance(grammar, GuidanceGrammar) and (problem := grammar.ll_matcher.get_error()):
            raise ValueError(problem)  # vLLM only logs it
        allowed = manager.backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(allowed, 0)
        return constraint if bool((allowed != 0).any()) else _NOTHING


_check: Check
"""The check of this process."""


def _check_kept(constraint: StructuredOutputsParams, by_xgrammar: bool) -> None:
    """Raises `ValueError` for what xgrammar, or llguidance, would not keep.  What is no JSON is left to vLLM."""
    if constraint.regex and by_xgrammar:
        check_regex(constraint.regex)
    if constraint.json is not None:
        with contextlib.suppress(json.JSONDecodeError):
            schema = json.loads(constraint.json) if isinstance(constraint.json, str) else constraint.json
            (check_schema if by_xgrammar else check_least_properties)(schema)
