"""vLLM's serving objects for models that embed or score text instead of generating it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import vllm  # noqa: F401  (first: its submodules do not import alone)
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    ScoreDataRequest,
    ScoreQueriesDocumentsRequest,
    ScoreQueriesItemsRequest,
    ScoreTextRequest,
)
from vllm.entrypoints.pooling.scoring.serving import ServingScores
from vllm.entrypoints.pooling.utils import enable_scoring_api
from vllm.renderers.chat_utils import ChatTemplateConfig

from backend.engine.front.client import FleetClient

__all__ = [
    "EmbeddingChatRequest",
    "EmbeddingCompletionRequest",
    "Pooling",
    "RerankRequest",
    "ScoreDataRequest",
    "ScoreQueriesDocumentsRequest",
    "ScoreQueriesItemsRequest",
    "ScoreTextRequest",
]


class Pooling:
    """The serving objects, each made at its first use: a model's tasks are known only after a verifier has loaded it."""

    def __init__(self, client: FleetClient[Any], models: OpenAIServingModels, chat_template: str | None) -> None:
        self._client = client
        self._models = models
        self._template = ChatTemplateConfig(chat_template=chat_template)

    @property
    def is_model(self) -> bool:
        """Whether the model embeds or scores; else it generates."""
        return bool(self._client.model_config.runner_type == "pooling")

    @cached_property
    def embedding(self) -> ServingEmbedding | None:
        """None if the model does not embed."""
        if self._client.model_config.get_pooling_task(self._tasks) != "embed":
            return None
        return ServingEmbedding(self._client, self._models, request_logger=None, chat_template_config=self._template)

    @cached_property
    def scores(self) -> ServingScores | None:
        """None if the model does not score pairs of texts."""
        if not enable_scoring_api(self._tasks, self._client.model_config):
            return None
        return ServingScores(
            self._client,
            self._models,
            supported_tasks=self._tasks,
            request_logger=None,
            chat_template_config=self._template,
        )

    @property
    def _tasks(self) -> tuple[Any, ...]:
        """The tasks that the verifiers support; empty if there is no verifier."""
        links = self._client.core.routable()
        return tuple(links[0].welcome.supported_tasks) if links and links[0].welcome is not None else ()
