"""The proposer that vLLM is configured with when drafts come from elsewhere: it proposes nothing.

vLLM's `custom_class` method gives its scheduler and its runner their speculative paths.  The drafts are attached by
`scheduler.py`, and verified by `sampling.py`.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig


class RemoteProposer:
    """vLLM's proposer interface with nothing behind it."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """No weights here; vLLM's CPU runner calls it all the same."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """No drafts, for any request."""
        return [[] for _ in sampled_token_ids]
