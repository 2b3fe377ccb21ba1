"""Verifiers in processes of their own, as fixtures use them.  Tests only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from backend.demo import DRAFTER_DIR, TARGET_DIR
from backend.fleet import DrafterRef
from backend.models import ResolvedModels
from tests.support.engine_client import EngineClient

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


class Verifier:
    """A running verifier and a client of it."""

    def __init__(self, directory: Path, settings: dict[str, Any], paths: ResolvedModels | None = None) -> None:
        address = f"ipc://{directory}/v{os.urandom(3).hex()}.sock"
        # The test's client pings only while it waits.
        settings = settings | {"verifier": {"gateway_lease_s": 3600} | settings.get("verifier", {})}
        job = {"settings": settings, "paths": msgspec.to_builtins(paths or demo_models()), "address": address}
        self._log = open(directory / f"verifier-{os.urandom(3).hex()}.log", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.run_verifier", json.dumps(job)],
            cwd=ROOT,
            env=os.environ | ENGINE_ENV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                break
        else:
            self._log.seek(0)
            raise RuntimeError(f"the verifier did not start:\n{self._log.read()[-3000:]}")
        self.address: str = json.loads(line)["address"]
        self.pid = self._process.pid
        self.client = EngineClient(self.address)

    def set_drafters(self, *refs: DrafterRef) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(msgspec.to_builtins(list(refs))) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self.client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._log.close()
