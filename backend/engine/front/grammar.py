"""Checks structured outputs before a verifier gets them: valid, compilable within limits, matching some text.

vLLM validates in the event loop and compiles in threads that cannot be stopped.  Here both happen in a separate process, which
is killed when it reaches a limit or the client leaves.  `GrammarChecks` runs in the gateway's event loop, `_serve` in that
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
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
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
GRACE_S = 1.0
"""Time for a check whose client has left.  Most end sooner, and a new process costs more."""
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
        self._busy: set[_Worker] = set()
        # More threads than workers: a thread whose check was cancelled needs a moment to end.
        self._threads = ThreadPoolExecutor(4 * WORKERS, thread_name_prefix="grammar")
        self._verdicts: dict[bytes, StructuredOutputsParams | str] = {}

    async def checked(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """Returns `constraint` as a verifier should get it.  Raises `VLLMValidationError`.  Cancelling ends the check."""
        key = hashlib.sha256(pickle.dumps(constraint)).digest()
        if (verdict := self._verdicts.get(key)) is None:
            work = asyncio.ensure_future(self._decide(key, constraint))
            # After a cancellation nothing awaits `work`; reading its exception avoids a warning.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                verdict = await asyncio.shield(work)
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_later(GRACE_S, work.cancel)
                raise
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

        # Not in the pool: the gateway's exit would wait for the import.
        threading.Thread(target=start, name="grammar-start", daemon=True).start()

    def close(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, key: bytes, constraint: StructuredOutputsParams) -> StructuredOutputsParams | str:
        async with self._slots:
            # Another sequence of the request may have been checked meanwhile.
            if (verdict := self._verdicts.get(key)) is None:
                verdict = await self._ask(constraint)
                if isinstance(verdict, str) or len(repr(verdict)) <= KEPT_CHARS:
                    self._verdicts[key] = verdict
                if len(self._verdicts) > KEPT:
                    del self._verdicts[next(iter(self._verdicts))]
            return verdict

    async def _ask(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams | str:
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        worker = self._idle.pop() if self._idle else await run(_Worker, self._vllm_config)
        self._busy.add(worker)
        try:
            verdict = await run(worker.ask, constraint)
        except (EOFError, OSError):
            # The process has reached a limit, or has crashed because of this grammar.
            worker.end()
            return _TOO_MUCH
        except BaseException:
            worker.end()
            raise
        finally:
            self._busy.discard(worker)
        self._idle.append(worker)
        return verdict


class _Worker:
    """A process that checks grammars.  Used by one thread at a time, except `end`.  It ends with this object, too."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Forks the process and waits until it is ready: in a thread."""
        _forks.set_forkserver_preload([__name__])
        self._pipe, theirs = _forks.Pipe()
        self._process = _forks.Process(target=_serve, args=(vllm_config, theirs, CPU_LIMIT_S), name="grammar", daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process that checks grammars did not start") from None

    def ask(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams | str:
        """The verdict: the parameters to send, or an error message.  Raises `EOFError` or `OSError` if the process has died."""
        self._pipe.send(constraint)
        verdict: StructuredOutputsParams | str = self._pipe.recv()
        return verdict

    def end(self) -> None:
        """Kills the process."""
        self._process.kill()


def _serve(vllm_config: VllmConfig, pipe: Connection, cpu_limit_s: float) -> None:
    """Main function of the process: makes checks until the gateway is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway ends this process
    # The libraries print patterns and schemas, which must not reach the logs.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    check = Check(vllm_config)
    _limit_memory()
    pipe.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            constraint = pipe.recv()
            # Either signal kills the process, even in the middle of native code.
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
            try:
                verdict: StructuredOutputsParams | str = check(constraint)
            except MemoryError:
                return
            except Exception as error:
                verdict = _ECHO.sub(_without_echo, (str(error) or _TOO_MUCH).splitlines()[0])
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pipe.send(verdict)


def _without_echo(quoted: re.Match[str]) -> str:
    return quoted[0] if quoted[0].strip('"') in KEYWORDS else ""


def _limit_memory() -> None:
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY_LIMIT_BYTES, resource.RLIM_INFINITY))


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
            for schema in _schemas_of(constraint.structural_tag):
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


def _check_kept(constraint: StructuredOutputsParams, by_xgrammar: bool) -> None:
    """Raises `ValueError` for what xgrammar, or llguidance, would not keep.  What is no JSON is left to vLLM."""
    if constraint.regex and by_xgrammar:
        check_regex(constraint.regex)
    if constraint.json is not None:
        with contextlib.suppress(json.JSONDecodeError):
            schema = json.loads(constraint.json) if isinstance(constraint.json, str) else constraint.json
            (check_schema if by_xgrammar else check_least_properties)(schema)


def _schemas_of(structural_tag: str) -> list[dict[str, Any]]:
    with contextlib.suppress(json.JSONDecodeError):
        return [schema for schema in schemas_of_tag(structural_tag) if isinstance(schema, dict) and schema]
    return []
