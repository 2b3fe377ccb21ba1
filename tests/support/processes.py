"""Verifiers in processes of their own, as fixtures use them.  Tests only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from backend.engine.client import EngineClient
from backend.fleet import DrafterRef
from backend.models.demo import DRAFTER_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels

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


class Child:
    """A helper module running in a process of its own; the first JSON line it prints says that it is ready."""

    def __init__(self, module: str, job: dict[str, Any], directory: Path) -> None:
        self._log = open(directory / f"{module.rpartition('.')[2]}-{os.urandom(3).hex()}.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job)],
            cwd=ROOT,
            env=os.environ | ENGINE_ENV,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.address: str = json.loads(line)["address"]
                return
        self._log.seek(0)
        raise RuntimeError(f"{module} did not start:\n{self._log.read()[-3000:]}")

    def tell(self, message: Any) -> None:
        """One JSON line on its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(msgspec.to_builtins(message)) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Ends its input and waits for it to stop."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            if self.process.returncode not in (0, -signal.SIGKILL):
                # Shown with the test that fails for it.
                self._log.seek(0)
                print(f"{self.process.args[2]} ended with {self.process.returncode}:\n{self._log.read()[-6000:]}")
            self._log.close()


class Verifier(Child):
    """A running verifier and a client of it."""

    def __init__(self, directory: Path, settings: dict[str, Any], paths: ResolvedModels | None = None) -> None:
        # The test's client pings only while it waits.
        settings = settings | {"verifier": {"gateway_lease_s": 3600} | settings.get("verifier", {})}
        address = f"ipc://{directory}/v{os.urandom(3).hex()}.sock"
        # Drafters know a verifier by its name: two of one name would take each other's place.
        self.name = f"verifier-{os.urandom(3).hex()}"
        job = {
            "verifier_id": self.name,
            "settings": settings,
            "paths": msgspec.to_builtins(paths or demo_models()),
            "address": address,
        }
        super().__init__("tests.support.run_verifier", job, directory)
        self.client = EngineClient(self.address)

    def set_drafters(self, *refs: DrafterRef) -> None:
        self.tell(list(refs))

    def close(self) -> None:
        self.client.close()
        super().close()


class Drafter(Child):
    """A running drafter."""

    def __init__(self, directory: Path, paths: ResolvedModels | None = None, **settings: Any) -> None:
        address = f"ipc://{directory}/d{os.urandom(3).hex()}.sock"
        job = {"paths": msgspec.to_builtins(paths or demo_models()), "address": address, "settings": settings}
        super().__init__("tests.support.run_drafter", job, directory)
        self.ref = DrafterRef("drafter-0", os.urandom(4).hex(), self.address, "", 1)
