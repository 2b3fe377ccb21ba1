"""A rollout's verifiers without engines, and its half of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from backend.models.demo import TARGET_DIR
from backend.rollout.requests import Tokenizer
from backend.rollout.workers import Workers
from tests.support.rollout_fleet import Fleet, rollout_fleet


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with rollout_fleet(tmp_path, monkeypatch) as fleet:
        yield fleet


@pytest.fixture
def workers(fleet: Fleet) -> Iterator[Workers]:
    with closing(Workers(fleet, None)) as workers:  # type: ignore[arg-type]
        yield workers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET_DIR))
