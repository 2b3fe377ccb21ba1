"""The demo model's tokens."""

import pytest

from backend.models.demo import TARGET_DIR
from backend.rollout.requests import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(TARGET_DIR))
