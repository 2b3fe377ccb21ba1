"""Starts the fleet under test, `outrider serve` as a child process; queries it, kills a drafter, ends it.  The parent process.

Only processes started here are ever killed: a drafter is killed only if its reported process id is a descendant of the child.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
HTTP_TIMEOUT_S = 10.0


class FleetError(RuntimeError):
    """The fleet does not start or does not answer."""


def session(api_key: str | None) -> requests.Session:
    """A session whose requests go straight to the gateway: proxies and credentials in the environment are ignored."""
    found = requests.Session()
    found.trust_env = False
    if api_key:
        found.headers["authorization"] = f"Bearer {api_key}"
    return found


class Gateway:
    """Read-only requests to a running gateway."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = session(api_key)

    def get(self, path: str) -> requests.Response:
        """The response to a GET.  Raises `FleetError` unless its status is 200."""
        try:
            answer = self._session.get(self.url + path, timeout=HTTP_TIMEOUT_S)
        except requests.RequestException as error:
            raise FleetError(f"{self.url} does not answer: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise FleetError(f"{self.url}{path} answers {answer.status_code}")
        return answer

    def model(self) -> str:
        """The first model served."""
        try:
            return str(self.get("/v1/models").json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise FleetError(f"{self.url}/v1/models lists no model") from error

    def drafters(self) -> dict[int, str]:
        """The ready drafters: id by process id."""
        listed: list[dict[str, Any]] = self.get("/fleet").json()["drafters"]
        return {int(each["pid"]): str(each["id"]) for each in listed if each["state"] == "ready"}


class OwnFleet:
    """A fleet that the constructor starts and `stop` ends."""

    def __init__(self, settings: Sequence[str], log: Path) -> None:
        self._log = log
        self._output = log.open("w", encoding="utf-8")
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", *settings]
        self.url = ""
        self._told = threading.Event()
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, name="fleet-output", daemon=True)
        self._reader.start()

    def wait_ready(self) -> str:
        """Waits until the fleet serves; returns the gateway's URL.  Raises `FleetError` with the fleet's last lines."""
        self._told.wait(START_TIMEOUT_S)
        if not self.url:
            self.stop()
            last = self._log.read_text(encoding="utf-8").strip().splitlines()[-3:]
            raise FleetError("the fleet did not start:\n  " + "\n  ".join(last or ["it said nothing"]))
        return self.url

    def kill_a_drafter(self, gateway: Gateway) -> str:
        """Kills one drafter of this fleet with SIGKILL; returns its name.  Raises `FleetError` when there is none."""
        ours = descendants(self.process.pid)
        for pid, name in gateway.drafters().items():
            if pid in ours:
                os.kill(pid, signal.SIGKILL)
                return f"{name} (pid {pid})"
        raise FleetError("no drafter of this fleet is there to be killed (does its mode use any?)")

    def stop(self) -> None:
        """Ends the fleet as with Ctrl-C, and kills it if it does not end in time.  May be called twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        self._reader.join(HTTP_TIMEOUT_S)
        self._output.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._output.write(line)
            self._output.flush()
            if found := re.search(r"serving at (http://\S+?)/v1", line):
                self.url = found.group(1)
                self._told.set()
        self._told.set()


def descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()
