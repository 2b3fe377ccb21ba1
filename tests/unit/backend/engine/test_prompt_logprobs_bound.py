"""The bound on the log probabilities of a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from backend.engine.front.client import FleetClient


async def test_all_of_the_vocabulary_counts_as_many() -> None:
    client: Any = SimpleNamespace(max_prompt_logprobs=1000, model_config=SimpleNamespace(get_vocab_size=lambda: 500))
    for asked in (-1, 500):
        with pytest.raises(VLLMValidationError, match="max_prompt_logprobs"):
            await FleetClient.add_request(
                client, "a", {"prompt_token_ids": [1, 2]}, SamplingParams(prompt_logprobs=asked, max_tokens=1)
            )
