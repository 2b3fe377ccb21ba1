"""Runs a fleet as a child process.  Used in the caller's process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePath

from outrider.types import OutriderError

POLL_S = 0.05
SHOWN_LINES, SHOWN_BYTES = 40, 16384
"""How much of the end of the fleet's output an error shows, whichever is less."""
SECRETS = {
    "api_key": "OUTRIDER_GATEWAY__API_KEY",
    "gateway_api_key": "OUTRIDER_GATEWAY__API_KEY",
    "gateway_admin_key": "OUTRIDER_GATEWAY__ADMIN_KEY",
}
"""Settings that are given to the fleet as these variables."""


class FleetProcess:
    """`outrider serve` on a free loopback port, in a session of its own.  The caller gets no signal handlers and no Ray."""

    def __init__(self, settings: dict[str, object], *given: str) -> None:
        """`given` are further settings, written as on the command line."""
        texts = {name: _text(value) for name, value in settings.items() if value is not None}
        # Everyone on the machine can read flags.
        secrets = {variable: texts.pop(name) for name, variable in SECRETS.items() if name in texts}
        flags = [f"--{name.replace('_', '-')}={text}" for name, text in texts.items()]
        # For torchrun's own processes: torch would look for the store of a verifier's group in the trainer's, and find none.
        # And for a job's driver: the fleet's Ray would take over the job's files and variables.
        strangers = ("TORCHELASTIC_", "RAY_JOB_CONFIG_JSON_ENV_VAR")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
        self._ready = tempfile.NamedTemporaryFile(prefix="outrider-")  # noqa: SIM115  (the URL is written to it)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as this object)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outrider.child", str(os.getpid()), "serve", "--port=0", *flags, *given],
            env=environment | secrets | {"PYTHONUNBUFFERED": "1", "OUTRIDER_READY_FILE": self._ready.name},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._say("a fleet starts; this takes a minute, longer where a model is downloaded")

    def wait_until_it_serves(self, timeout_s: float) -> str:
        """The fleet's URL, when it serves.  Raises `OutriderError` with the end of the log if it does not serve in time."""
        deadline = time.monotonic() + timeout_s
        while not (url := Path(self._ready.name).read_text(encoding="utf-8")):
            if self.ended or time.monotonic() > deadline:
                self.stop()
                raise OutriderError(0, "fleet_not_started", f"the fleet did not start:\n{self.tail}")
            time.sleep(POLL_S)
        self._say(f"the fleet serves at {url}")
        return url

    @staticmethod
    def _say(line: str) -> None:
        """Tells a person at the terminal; the caller's own output stays its own."""
        sys.stderr.write(f"outrider: {line}\n")

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def tail(self) -> str:
        """The last lines of its output."""
        # Not by `seek`: the child writes at the same position.
        log = self._log.fileno()
        text = os.pread(log, SHOWN_BYTES, max(0, os.fstat(log).st_size - SHOWN_BYTES)).decode(errors="replace")
        return "".join(text.splitlines(keepends=True)[-SHOWN_LINES:])

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ends the fleet as Ctrl-C would; kills it if it does not end in time."""
        assert self._process.stdin is not None
        # Closing its input is not enough: where the caller has forked since, another process holds it open.
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdin.close()
        self._ready.close()


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | PurePath) else json.dumps(value)
