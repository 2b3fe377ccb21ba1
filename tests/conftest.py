"""What every test finds: an environment without the user's own settings, and patient property tests."""

from __future__ import annotations

import os

import hypothesis
import pytest

# Tensors of tests are tiny: more threads only wait for each other, and for a core where others work, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The same examples everywhere: a change is judged by what it did.  The campaign looks for new ones, and for ten times as many.
hypothesis.settings.register_profile("outrider", deadline=None, derandomize=True)
hypothesis.settings.register_profile("campaign", deadline=None, derandomize=False, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("outrider")


def pytest_itemcollected(item: pytest.Item) -> None:
    """While tests are collected, the process that engines are forked from imports vLLM on the other core."""
    options = item.config.option
    if item.get_closest_marker("engine") and "not engine" not in options.markexpr and not options.collectonly:
        from tests.support.processes import start_fork_server

        start_fork_server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file share engines, those of `served` a fleet: one process of `-n 2` runs them all."""
    for item in items:
        place = item.path.parent if item.path.parent.name == "served" else item.path
        item.add_marker(pytest.mark.xdist_group(f"{place.parent.name}/{place.stem}"))


@pytest.fixture(scope="session", autouse=True)
def no_settings_from_outside() -> None:
    """`OUTRIDER_*` variables of the person who runs the tests must not change them."""
    for name in list(os.environ):
        if name.startswith("OUTRIDER_"):
            del os.environ[name]
