"""The child process of `outrider.Fleet`: what it is given, what it says, and when it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest

from outrider import AsyncFleet, Fleet, OutriderError
from outrider.process import FleetProcess
from tests.support.process_tree import wait_gone


def test_a_proxy_is_not_asked_for_this_machines_fleets_and_a_fleet_of_its_own_is_called_with_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = Mock()
    monkeypatch.setattr("outrider.connection.httpx.AsyncClient", client)
    for url, proxied in (("http://127.0.0.1:8000", False), ("http://node-7:8000", True)):
        AsyncFleet.join(url)
        assert client.call_args.kwargs["trust_env"] == proxied
    (tmp_path / "key").write_text("of-a-file\n")
    for given, sent in (("plain", "plain"), (f"@{tmp_path}/key", "of-a-file")):
        AsyncFleet("demo", gateway_api_key=given)
        options = client.call_args.kwargs
        assert (options["headers"], options["trust_env"]) == ({"Authorization": f"Bearer {sent}"}, False)


def test_a_fleet_that_does_not_start_says_why() -> None:
    with pytest.raises(OutriderError, match="verifers") as raised, Fleet(verifers=2):
        pass
    assert raised.value.code == "fleet_not_started"


def test_what_a_fleets_process_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag shows its key, and torchrun's variables are not passed on: torch would wait for a store that nobody opens."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    start = Mock(side_effect=OSError("not today"))
    monkeypatch.setattr("outrider.process.subprocess.Popen", start)
    paths = {"state_dir": Path("/state"), "gateway_api_key": "plain"}
    with pytest.raises(OSError, match="not today"), Fleet(Path("/models/demo"), Path("/heads/demo"), **paths):
        pass
    (command,), environment = start.call_args.args, start.call_args.kwargs["env"]
    assert {"--model=/models/demo", "--drafter=/heads/demo", "--state-dir=/state"} <= {*command}
    assert "plain" not in " ".join(command)
    assert environment["OUTRIDER_GATEWAY__API_KEY"] == "plain"
    assert environment.keys() >= {"PATH", "PYTHONUNBUFFERED"}
    assert not environment.keys() & {"TORCHELASTIC_USE_AGENT_STORE", "RAY_JOB_CONFIG_JSON_ENV_VAR"}


def test_a_fleet_says_that_it_starts_and_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(_: list[str], env: dict[str, str], stdout: IO[bytes], **others: Any) -> Mock:
        stdout.write(b"model demo\n" * 100 + b"serving\n")
        stdout.flush()
        Path(env["OUTRIDER_READY_FILE"]).write_text("http://127.0.0.1:8123")
        return Mock(poll=lambda: None)

    monkeypatch.setattr("outrider.process.subprocess.Popen", start)
    fleet = FleetProcess({})
    assert fleet.wait_until_it_serves(60) == "http://127.0.0.1:8123"
    assert fleet.tail == "model demo\n" * 39 + "serving\n"
    output = capsys.readouterr()
    told = [line.split(";")[0] for line in output.err.splitlines()]
    assert told == ["outrider: a fleet starts", "outrider: the fleet serves at http://127.0.0.1:8123"]
    assert not output.out


WAITS = """
import os, signal, sys
from outrider.child import end_with_parent
signal.signal(signal.SIGINT, lambda *_: os._exit(0))
print(os.getpid(), flush=True)
end_with_parent(int(sys.argv[1]))
"""


FORKS = f"""
import os, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WAITS!r}, str(os.getpid())], stdin=subprocess.PIPE)
if not os.fork():
    signal.pause()
signal.pause()
"""


def test_a_fleet_ends_with_its_parent_also_where_that_has_forked() -> None:
    program = subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        program.kill()
        wait_gone([child])
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, outrider; print(*{'torch', 'vllm', 'ray', 'transformers', 'numpy'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
