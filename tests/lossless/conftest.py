"""A drafter for all tests of a module."""

from collections.abc import Iterator

import pytest

from tests.support.processes import Drafter


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """The demo's head."""
    with Drafter(tmp_path_factory.mktemp("d")) as started:
        yield started
