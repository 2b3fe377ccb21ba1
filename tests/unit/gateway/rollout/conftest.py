"""A rollout's verifiers without engines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rollout_workers import Workers


@pytest.fixture
async def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    workers = Workers(tmp_path, monkeypatch)
    yield workers
    workers.close()
