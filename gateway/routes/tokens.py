"""POST /inference/v1/generate, vLLM's route for trainers.  Takes and returns token ids; also returns the weights' versions."""

from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from backend.engine.front import GenerateRequest, GenerateTokensResponse
from backend.engine.front.config import PARAMETERS, VERIFIERS
from backend.records.rows import REQUEST_ID_KEY
from backend.wire.engine import FIXED_RESPONSE
from gateway.auth.rights import Right
from gateway.http.errors import BadRequest
from gateway.http.openapi import described
from gateway.http.sse import CHAT
from gateway.requests.body import parse, read_json, unknown
from gateway.requests.fields import GENERATING
from gateway.requests.limits import check_bounds
from gateway.requests.options import read_options
from gateway.routes.generate import respond
from gateway.state import gateway_of

router = APIRouter()

TRANSFERS = frozenset({"ec_transfer_params", "kv_transfer_params", "kv_cache_report_mode"})
"""Keys of `extra_args` that vLLM's engine itself reads."""


@router.post("/inference/v1/generate", **described(GenerateRequest, GenerateTokensResponse, streams=True, right=Right.GENERATE))
async def generate_tokens(request: Request) -> Response:
    """vLLM's route for trainers: takes and returns token ids."""
    gateway = gateway_of(request)
    data = await read_json(request)
    parameters = data.get("sampling_params")
    if not isinstance(parameters, dict):
        raise BadRequest("`sampling_params` must be an object.", param="sampling_params")
    for name in parameters:
        if name not in PARAMETERS:
            raise BadRequest(unknown(name, PARAMETERS), param="sampling_params", code="unknown_parameter")
    check_bounds(parameters)
    parameters["extra_args"] = _extra_args(parameters.get("extra_args"))
    speculation = await read_options(gateway, request, data)
    body = parse(GenerateRequest, data, GENERATING)
    sampling = body.sampling_params
    # For checks and admission, the request looks like a text completion.
    view = SimpleNamespace(
        model=body.model,
        prompt=body.token_ids,
        n=sampling.n,
        max_tokens=sampling.max_tokens if "max_tokens" in parameters else None,
        min_p=sampling.min_p,
        logit_bias=sampling.logit_bias,
        logprob_token_ids=sampling.logprob_token_ids,
    )

    async def create(_: Any, request: Request) -> Any:
        return await gateway.services.tokens.serve_tokens(body, request)

    return await respond(gateway, request, view, create, CHAT, lambda answer: answer.model_dump(mode="json"), speculation)


def _extra_args(body: Any) -> dict[str, Any] | None:
    """What custom logits processors are told, as by `vllm_xargs` elsewhere; neither the verifier's own nor vLLM's arguments."""
    if not isinstance(body, dict | None):
        raise BadRequest("`extra_args` must be an object.", param="sampling_params")
    if FIXED_RESPONSE in (body or {}):
        raise BadRequest(f"`{FIXED_RESPONSE}` belongs to rollouts.", param="sampling_params")
    kept = {
        name: value
        for name, value in (body or {}).items()
        if name == REQUEST_ID_KEY or not (name.startswith(VERIFIERS) or name in TRANSFERS)
    }
    return kept or None
