"""vLLM's serving objects for models that embed or score text instead of generating it."""

from functools import cached_property
from typing import Any

import msgspec
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest, EmbeddingResponse
from vllm.entrypoints.pooling.embed.serving import ServingEmbedding
from vllm.entrypoints.pooling.scoring.protocol import (
    RerankRequest,
    ScoreDataRequest,
    ScoreQueriesDocumentsRequest,
    ScoreQueriesItemsRequest,
    ScoreTextRequest,
)
from vllm.entrypoints.pooling.scoring.serving import ServingScores
from vllm.entrypoints.pooling.utils import enable_scoring_api, get_pooling_output_encoder, get_pooling_usage
from vllm.renderers.chat_utils import ChatTemplateConfig

from backend.engine.front.client import FleetClient
from backend.engine.front.deferred import in_turns


class Embedding(ServingEmbedding):
    """vLLM's serving class, except that JSON is made vector by vector: one call for thousands would hold up the event loop."""

    def _openai_json_response(
        self, final_res_batch: Any, request_id: str, created_time: int, model_name: str, encoding_format: Any, *args: Any
    ) -> Any:
        # Runs in a thread.
        encoded = get_pooling_output_encoder(encoding_format, *args)
        usage = get_pooling_usage(final_res_batch)
        around = EmbeddingResponse(id=request_id, created=created_time, model=model_name, data=[], usage=usage)
        before, data, after = around.model_dump_json().encode().partition(b'"data":[')
        vectors = [
            (b"," if index else b"")
            + msgspec.json.encode({"index": index, "object": "embedding", "embedding": encoded(result)})
            for index, result in enumerate(final_res_batch)
        ]
        return in_turns(b"".join([before, data, *vectors, after]))


class PoolingServing:
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
    def embedding(self) -> Embedding | None:
        """None if the model does not embed."""
        if self._client.model_config.get_pooling_task(self._tasks) != "embed":
            return None
        return Embedding(self._client, self._models, request_logger=None, chat_template_config=self._template)

    @cached_property
    def scores(self) -> ServingScores | None:
        """None if the model does not score pairs of texts."""
        if not enable_scoring_api(self._tasks, self._client.model_config):
            return None
        return ServingScores(
            self._client, self._models, supported_tasks=self._tasks, request_logger=None, chat_template_config=self._template
        )

    @property
    def _tasks(self) -> tuple[Any, ...]:
        """The tasks that the verifiers support; empty if there is no verifier."""
        links = self._client.core.routable_links()
        return tuple(links[0].welcome.supported_tasks) if links and links[0].welcome is not None else ()
