"""POST /v1/embeddings, /v1/score and /v1/rerank, for models that embed or score text."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.engine.front import pooling as vllm
from gateway.admission.admit import admit
from gateway.auth.rights import Right
from gateway.http.errors import BadRequest
from gateway.http.openapi import LIST, described, shape
from gateway.http.sse import unless_disconnected
from gateway.requests.body import parse, read_json
from gateway.state import gateway_of

router = APIRouter()
Model = Any
"""One of vLLM's request models."""


@router.post(
    "/v1/embeddings", **described((vllm.EmbeddingCompletionRequest, vllm.EmbeddingChatRequest), LIST, right=Right.GENERATE)
)
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings; with `messages` instead of `input`, the chat template is applied."""
    return await _pool(request, "embedding", _embedding)


@router.post(
    "/v1/score",
    **described(
        (vllm.ScoreTextRequest, vllm.ScoreDataRequest, vllm.ScoreQueriesDocumentsRequest, vllm.ScoreQueriesItemsRequest),
        LIST,
        right=Right.GENERATE,
    ),
)
async def score(request: Request) -> Response:
    """Scores how well pairs of texts fit: `queries` and `documents`, or `text_1` and `text_2`."""
    return await _pool(request, "scores", _score)


@router.post("/v1/rerank", **described(vllm.RerankRequest, shape("results"), right=Right.GENERATE))
async def rerank(request: Request) -> Response:
    """Orders documents by how well they fit a query."""
    return await _pool(request, "scores", lambda data: vllm.RerankRequest)


def _embedding(data: dict[str, Any]) -> Model:
    return vllm.EmbeddingChatRequest if "messages" in data else vllm.EmbeddingCompletionRequest


def _score(data: dict[str, Any]) -> Model:
    if "text_1" in data:
        return vllm.ScoreTextRequest
    if "data_1" in data:
        return vllm.ScoreDataRequest
    return vllm.ScoreQueriesItemsRequest if "items" in data else vllm.ScoreQueriesDocumentsRequest


async def _pool(request: Request, kind: str, model: Callable[[dict[str, Any]], Model]) -> Response:
    gateway = gateway_of(request)
    data = await read_json(request)
    body: Any = parse(model(data), data)
    admit(gateway, request, body)
    await gateway.client.core.until_routable()
    serving = getattr(gateway.services.pooling, kind) if gateway.services.pooling.is_model else None
    if serving is None:
        raise BadRequest(f"This model makes no {'embeddings' if kind == 'embedding' else 'scores'}.", param="model")
    answer: Response = await unless_disconnected(request, serving(body, request))
    return answer
