"""The command line without a fleet: help, mistakes, the settings and the tables it prints."""

import errno
import hashlib
import os
import socket
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
import yaml

from backend.config import Settings
from backend.config import runtime as runtime_files
from backend.config.sources import ConfigError, load
from backend.coordinator.messages import FleetInfo
from backend.fleet import (
    Assignment,
    DraftCounters,
    DrafterStats,
    FleetSnapshot,
    Learning,
    Member,
    MemberKind,
    MemberView,
    VerifierStats,
)
from backend.launch import finding, state
from backend.launch.cluster import ClusterError, RayCluster
from backend.models.resolve import ResolvedModels
from gateway.auth.key_ring import read_entries
from gateway.cli import console
from gateway.cli import main as cli
from gateway.cli.preflight import here

DEMO = ResolvedModels("/t", "/d", "eagle", "demo")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


MISTAKES = {
    "fly": "no command 'fly'",
    "serve --drafters 0": "--mode auto needs a drafter",
    "check-config --verifiers 0": "--verifiers: input should be greater than or equal to 1",
    "rollout": "required: --trace, --out",
    "trace": "outrider trace make",
    "run-batch": "required: -i/--input-file, -o/--output-file",
    "trace make nowhere --out {tmp}/t": "nowhere: no such directory",
    "drain": "required: member",
    "add gateway": "invalid choice: 'gateway'",
    "assign d0": "--auto",
    "assign d0 v0 --auto": "--auto",
    "restart": "--rolling",
    "restart --rolling v0": "--rolling",
    "resume v0 --migrate": "--migrate",
    "drain v0 --gateway-port 1": "--gateway-port",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.format(tmp=tmp_path).split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("outrider: ")
    assert MISTAKES[line] in error
    assert error.count("\n") == 1


def test_help_names_commands_and_a_key_is_made_and_shown_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert [cli.main([]), cli.main(["--help"])] == [2, 0]
    out = capsys.readouterr().out
    assert all(name in out for name in ("serve", "gateway", "status", "check-config", "train-demo", "rollout", "trace"))
    assert cli.main(["make-key", "alice"]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n{out}")
    (entry,) = read_entries(file)
    key = next(line for line in out.splitlines() if line.startswith("# or-")).removeprefix("# ")
    assert (entry.name, entry.sha256) == ("alice", [hashlib.sha256(key.encode()).hexdigest()])
    assert [cli.main(["make-key", *names]) for names in (["two words"], [])] == [2, 2]


@pytest.mark.parametrize(
    ("name", "path"), [("keys-file", "file"), ("tls-cert", "file"), ("state-dir", "file/state"), ("port", "")]
)
def test_wrong_files_and_a_busy_port_are_found_before_anything_starts(
    name: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("keys: 5")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1] if name == "port" else 0)
        wrong = [f"--gateway-{name}", str(tmp_path / path)] if path else []
        assert cli.main(["serve", *wrong, "--port", port]) == 2
    assert (name.replace("-", "_") if path else f"cannot listen on 127.0.0.1:{port}") in capsys.readouterr().err


def test_status_without_a_fleet_or_its_cluster_says_so_at_once(runtime: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert [cli.main(["status"]), cli.main(["status", "--ray-address", address])] == [1, 1]
    said = capsys.readouterr().err
    assert "no fleet of yours runs on this host" in said
    assert f"no Ray cluster at {address}" in said


def test_check_config_prints_yaml_with_sources(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_GATEWAY__API_KEY", "hush")
    assert cli.main(["check-config", "--verifiers", "2"]) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    sources = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in text.splitlines()}
    wanted = {"verifiers": "--verifiers", "api_key": "OUTRIDER_GATEWAY__API_KEY", "drafters": "default"}
    assert sources.items() >= wanted.items()
    read = yaml.safe_load(text)
    read["gateway"]["api_key"] = None
    assert Settings.model_validate(read) == Settings(verifiers=2)


def shown(name: str, kind: MemberKind, *assignments: Assignment, **stats: Any) -> str:
    """The table of a fleet of one member."""
    member = Member(name, kind, "i", "ipc:///x", "", "127.0.0.1", 7, "demo", "ready")
    return console.table(FleetSnapshot(1, [MemberView(member, 0.1, **stats)], list(assignments), {"restarts": 3}))


def test_the_table_shows_who_drafts_for_whom_and_how_well_and_what_heads_learned() -> None:
    counters = {"drafter-0": DraftCounters(drafts=10, accepted_tokens=15), "drafter-1": DraftCounters(drafts=10)}
    stats = VerifierStats("verifier-0", 0.0, "sync", 4, running=2, tokens=40, drafters=counters)
    text = shown("verifier-0", "verifier", Assignment("verifier-0", "drafter-0", 1), verifier=stats)
    for part in ("2 running, 0 waiting", "acceptance length 1.75", "drafters drafter-0", "restarts 3"):
        assert part in text

    for version, live, line in (
        (2, 0.48, "head version 2 (48% right), 90 steps"),
        (3, 0.62, "head version 3 (62% right), before it version 2 (58% right), 90 steps"),
        (3, None, "head version 3, before it version 2 (58% right), 90 steps"),
    ):
        learning = Learning(version=version, steps=90, live_acceptance=live, previous_version=2, previous_acceptance=0.58)
        drafter = DrafterStats("drafter-0", 0.0, learning=learning)
        assert line in shown("drafter-0", "drafter", drafter=drafter)


def test_the_command_to_paste_fits_the_model(tmp_path: Path) -> None:
    text = console.ready("http://0.0.0.0:8000", Settings(), DEMO)
    assert all(part in text for part in ("/v1/completions", "the fleet is at http://127.0.0.1:8000/ "))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    chat = ResolvedModels(str(tmp_path), None, "none", "some/model")
    text = console.ready("http://0.0.0.0:8000", Settings.model_validate({"gateway": {"api_key": "hush"}}), chat)
    assert all(part in text for part in ("curl -N http://127.0.0.1:8000/v1/chat/completions", "Authorization"))
    assert "hush" not in text


def fleet_file(pid: int, namespace: str = "outrider", directories: tuple[str, ...] = ()) -> state.FleetFile:
    return state.FleetFile(pid, namespace, "127.0.0.1:1", "", list(directories))


def test_a_fleet_that_listens_everywhere_is_announced_by_a_loopback_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # A gateway without an admin key takes commands under such names only.
    for name in ("check_gateway", "Thread"):
        monkeypatch.setattr(cli, name, Mock())
    monkeypatch.setattr("backend.launch.fleet.prepare_process", Mock())
    fleet = Mock(settings=Settings())
    monkeypatch.setattr("backend.launch.fleet.LaunchedFleet.launch", lambda *_: fleet)
    monkeypatch.setattr("backend.launch.operator.Operator.start", Mock())
    monkeypatch.setattr("backend.models.resolve.resolve", lambda *_: DEMO)
    monkeypatch.setattr(cli, "run_gateway", lambda settings, info, handle, announce, *_: announce("https://0.0.0.0:8000"))
    assert cli.main(["serve"]) == 0
    fleet.announce.assert_called_once_with("https://127.0.0.1:8000")
    assert here("http://[::]:8000") == "http://[::1]:8000"


@pytest.mark.parametrize(
    ("theirs", "given", "refused"),
    [
        ({}, [], ""),
        ({"api_key": "k"}, [], "gateway.api_key"),
        ({"api_key": "k"}, ["--api-key", "other"], ""),
        ({"admin_key": "k"}, ["--api-key", "other"], "gateway.admin_key"),
        ({"keys_file": "/k"}, ["--api-key", "other"], "gateway.keys_file"),
        ({"keys_file": "/k"}, ["--api-key", "other", "--gateway-admin-key", "k"], ""),
    ],
)
def test_a_further_gateway_needs_the_keys_that_its_fleet_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], theirs: dict[str, str], given: list[str], refused: str
) -> None:
    info = FleetInfo(Settings.model_validate({"gateway": theirs}).model_dump_json(), DEMO)
    monkeypatch.setattr(cli, "joined_fleet", lambda loaded: nullcontext((loaded.settings, info, None)))
    # The next check: it shows that keys were no reason to refuse.
    monkeypatch.setattr(cli, "check_gateway", Mock(side_effect=ConfigError("keys are right")))
    assert cli.main(["gateway", "--host", "0.0.0.0", *given]) == 2
    assert (f"served with {refused}:" if refused else "keys are right") in capsys.readouterr().err


def test_a_fleet_is_found_by_namespace_pid_or_the_port_on_the_command_line(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, port in ((os.getpid(), 8001), (os.getppid(), 8002)):
        state.write(msgspec.structs.replace(fleet_file(pid, f"at-{port}"), url=f"http://127.0.0.1:{port}"))
    find = Mock(side_effect=state.find)
    monkeypatch.setattr(state, "find", find)
    monkeypatch.setattr(RayCluster, "open", Mock(side_effect=ConfigError("found")))

    def found(*arguments: str, name: str | None = None) -> str:
        with suppress(ConfigError), finding.found_fleet(load([*arguments], "outrider status", ""), name):
            pass
        return str(state.find(*find.call_args.args).namespace)

    assert [found("--port", "8002"), found("--gateway-port=8001")] == ["at-8002", "at-8001"]
    assert found("--port=8002", name="at-8001") == "at-8001"
    assert found(name=str(os.getppid())) == "at-8002"
    monkeypatch.setenv("OUTRIDER_GATEWAY__PORT", "8002")
    for arguments, name, message in (
        (["--port", "9"], None, "no fleet 'port 9'"),
        ([], "three", "no fleet 'three'"),
        ([], None, "several fleets"),
    ):
        with pytest.raises(runtime_files.StateError, match=message):
            found(*arguments, name=name)


@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("owns_cluster", [False, True])
def test_our_token_is_shown_to_our_own_clusters_alone(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, owns_cluster: bool, by_address: bool
) -> None:
    """A cluster that the fleet has joined has a token of its own, in the user's environment."""
    shown: list[str | None] = []

    def connect(address: str, namespace: str, env: object, token: str | None) -> None:
        assert address == "127.0.0.1:1"
        shown.append(token)
        raise ClusterError("far enough")

    monkeypatch.setattr(RayCluster, "open", connect)
    state.write(msgspec.structs.replace(fleet_file(os.getpid()), owns_cluster=owns_cluster))
    arguments = ["--ray-address", "127.0.0.1:1"] if by_address else []
    with pytest.raises(ClusterError):
        cli.status(arguments)
    assert shown == [state.ray_token() if owns_cluster else None]


def test_a_dead_fleets_files_are_removed_and_nothing_else(runtime: Path, tmp_path: Path) -> None:
    ours, foreign = state.new_runtime_directory(), tmp_path / "precious"
    foreign.mkdir()
    file = state.write(fleet_file(2**22 - 1, directories=(str(ours), str(foreign))))
    assert state.running() == []
    assert not ours.exists()
    assert not file.exists()
    assert foreign.exists()


def test_the_runtime_directory_and_its_token_are_private(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token needs no hard links, and an empty file is none."""
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    home = runtime_files.home()
    file = home / "ray-token"
    file.touch()
    assert len(state.ray_token()) == 64
    assert state.ray_token() == file.read_text()
    assert [path.stat().st_mode & 0o777 for path in (home, file)] == [0o700, 0o600]
    file.unlink()
    file.mkdir()
    with pytest.raises(runtime_files.StateError, match="ray-token: Is a directory"):
        state.ray_token()
    home.chmod(0o755)
    with pytest.raises(runtime_files.StateError, match="nobody else may enter"):
        runtime_files.home()


def test_files_may_be_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert Settings.model_validate({"gateway": {"tls_cert": "~/a.pem"}}).gateway.tls_cert == "/home/me/a.pem"


@pytest.mark.parametrize(("status", "body"), [(404, {"detail": "Not Found"}), (200, {}), (200, [1]), (500, {"error": "sorry"})])
def test_what_answers_to_reload_and_is_no_gateway_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, body: object
) -> None:
    answer = httpx.Response(status, json=body)
    monkeypatch.setattr(httpx, "HTTPTransport", lambda verify: httpx.MockTransport(lambda request: answer))
    assert cli.main(["reload", "--port", "9"]) == 1
    line = f"outrider: http://127.0.0.1:9: no gateway of Outrider answers there (status {status})\n"
    assert capsys.readouterr().err == line
