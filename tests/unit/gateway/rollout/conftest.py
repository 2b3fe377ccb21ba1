"""A rollout's verifiers without engines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rollout_fleet import Fleet


@pytest.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, monkeypatch)
    yield fleet
    fleet.close()
