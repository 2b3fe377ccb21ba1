"""`outrider serve` as a child process, as a user would run it.  Tests only."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[2]
FLEETS: set[ServedFleet] = set()
"""Running fleets; their output is shown with a failing test."""
START_S = 400.0


class ServedFleet:
    """A fleet that the constructor starts, and `stop` or the end of a `with` block ends."""

    def __init__(
        self,
        *arguments: str,
        command: str = "serve",
        constants: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        key: str = "",
    ) -> None:
        """`prefix` is put before the command, to run it in another machine (`Machine.enter`); `http` sends the `key`.

        `constants` are other values of module constants in the gateway's process.
        A fleet of this machine ends with the test's process, one of another machine with that machine.
        """
        entry = ["gateway.cli"] if prefix else ["outrider.child", str(os.getpid())]
        if constants is not None:
            entry = ["tests.support.patched", str(os.getpid()), json.dumps(constants)]
        self.output: list[str] = []
        self._url = threading.Event()
        self.url = ""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *entry, command, "--port", "0", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._url.wait(START_S) or not self.url:
            self.process.kill()
            raise RuntimeError("the fleet did not start:\n" + "".join(self.output[-40:]))
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=120)
        FLEETS.add(self)

    def __enter__(self) -> ServedFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if found := re.search(r"serving at (http://\S+?)/v1", line):
                self.url = found.group(1)
                self._url.set()
        self._url.set()

    def fleet(self) -> Any:
        """GET /fleet."""
        return self.http.get("/fleet").json()

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http.get("/metrics").text, name, **labels)

    def complete(self, prompt: str | list[str], **fields: Any) -> Any:
        """POST /v1/completions, greedy."""
        body = {"model": "demo", "prompt": prompt, "temperature": 0} | fields
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, prompt: str, heard: Callable[[str], None] = lambda _: None, **fields: Any) -> str:
        """The text of a greedy streamed completion that ends as it should; `heard` is called with each piece."""
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True} | fields
        text, ends = "", []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                    heard(choice["text"])
                elif line and not line.startswith(":"):
                    ends.append(line)
        assert ends == ["length", "data: [DONE]"]
        return text

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`outrider ... --fleet` of this fleet, when it has ended."""
        command = [sys.executable, "-m", "gateway.cli", *arguments, "--fleet", str(self.process.pid)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    def interrupt(self) -> None:
        """Sends SIGINT to the fleet itself, even if it was started through `prefix`."""
        process = psutil.Process(self.process.pid)
        while process.name() == "nsenter":
            (process,) = process.children()
        process.send_signal(signal.SIGINT)

    def stop(self, timeout_s: float = 120.0) -> int:
        """Ends the fleet as with Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.interrupt()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()
            FLEETS.discard(self)
            self.http.close()


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels, on a page of metrics."""
    samples = (sample for family in text_string_to_metric_families(page) for sample in family.samples)
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def outrider(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """An `outrider` command; all that it writes comes by one pipe."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@contextmanager
def home_of_fleets() -> Iterator[Path]:
    """Where fleets keep their files, and commands look for them; short, as Ray's sockets live below it."""
    with (
        tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as directory,
        mock.patch.dict(os.environ, TMPDIR=directory, XDG_RUNTIME_DIR=directory),
    ):
        yield Path(directory)


def wait_for(condition: Callable[[], bool], timeout_s: float = 300.0, what: str = "the condition") -> None:
    """Polls until `condition()` holds, less and less often: to ask a fleet takes its processor's time."""
    deadline, pause_s = time.monotonic() + timeout_s, 0.05
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not hold within {timeout_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.5)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
