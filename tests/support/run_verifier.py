"""The main function of a test's verifier process.  Tests only."""

import gc
import logging
import threading
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock


def main(job: dict[str, Any], pipe: Connection) -> None:
    """Runs one `VerifierProcess` until the pipe closes.

    Each message is a list of `DrafterRef`s to assign, answered with the number of early steps so far when the engine has them.
    """
    import vllm  # noqa: F401  (must be the first of vLLM's modules)

    from backend.config import Settings
    from backend.engine import build
    from backend.engine.early import EarlySteps
    from backend.verifier.process import VerifierProcess
    from tests.support.steady import keep_steady

    logging.basicConfig(level="INFO")
    early, step = 0, EarlySteps.__call__

    def counted(self: EarlySteps) -> tuple[Any, bool]:
        nonlocal early
        outcome = step(self)
        early += self._scheduler.is_early
        return outcome

    EarlySteps.__call__ = counted  # type: ignore[method-assign]
    keep_steady(job["token_s"])
    build.DRAFT_DEADLINE_S = job["deadline_s"]
    settings = Settings.model_validate(job["settings"])
    process = VerifierProcess(job["verifier_id"], "incarnation", settings, job["paths"], job["address"])
    process.start()
    pipe.send(process.address)
    while True:
        try:
            process.set_drafters(pipe.recv())
        except EOFError:
            break
        loop, applied = process._loop, threading.Event()
        assert loop is not None
        loop._orders.put(applied.set)
        loop._hub.wake()
        applied.wait()
        pipe.send(early)
    # vLLM would collect garbage over everything imported, and so copy every page that is shared with other forks.
    with mock.patch.object(gc, "unfreeze"), mock.patch.object(gc, "collect"):
        process.stop()
