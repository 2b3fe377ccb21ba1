"""A service with a tiny head, under a clock that a test sets."""

from pathlib import Path

import pytest

from backend.drafter.eagle import EagleProposer
from backend.drafter.service import DrafterService
from tests.support.ahead_verifier import HEAD, Clock
from tests.support.drafter_heads import make_proposer


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def proposer(tmp_path: Path) -> EagleProposer:
    return make_proposer(tmp_path, HEAD)


@pytest.fixture
def service(proposer: EagleProposer, clock: Clock) -> DrafterService:
    return DrafterService("drafter-0", proposer, 60.0, clock)
