"""Makes the claim of a request that was read and checked: its model must be allowed, its tokens within the key's quota.

Tokens are estimated before the request is tokenized, and corrected to the true number when it has ended.
"""

import math
from typing import Any

from starlette.requests import Request

from gateway.admission.claim import Claim, enter_claim
from gateway.auth.caller import caller_of
from gateway.http.errors import BadRequest, ModelNotFound
from gateway.requests.body import header_flag
from gateway.requests.limits import count_prompts
from gateway.state import Gateway

BYTES_PER_TOKEN = 4
"""Bytes of a request's body per token, for the estimate.  About right for English text; corrected when the request ends."""
MAX_SEQUENCES = 512
"""Most sequences of one request, unless half of `gateway.max_in_flight` is more."""
_MANY = ("prompt", "input", "messages", "documents", "items", "text_2")
"""Fields that may hold more than one prompt."""
WAIT_HEADER = "x-outrider-max-wait-s"
"""Header with the seconds that a request may wait for room, up to `gateway.queue_wait_s`."""
SESSION_HEADER, LONGEST_SESSION = "x-session-id", 256
"""Header that names a session (else the field `user` does), and how many characters of the name count."""
LEARN_HEADER = "x-outrider-learn"
"""0: drafters must not learn from the request."""


def admit(gateway: Gateway, request: Request, body: Any) -> Claim:
    """Fills in and enters the claim of `body`.  Sequences that this task submits then belong to it.

    Raises `ModelNotFound`, `RateLimited` or `BadRequest`.
    """
    caller = caller_of(request)
    check_model(gateway, request, body)
    claim: Claim = request.scope["state"]["claim"]
    if claim.wait_s is not None:
        claim.wait_s = _wait_s(request.headers.get(WAIT_HEADER), gateway.settings.gateway.queue_wait_s)
    claim.request_id = request.headers.get("x-request-id", "")
    claim.session = (request.headers.get(SESSION_HEADER) or getattr(body, "user", None) or "")[:LONGEST_SESSION] or None
    claim.learn = caller.learn and header_flag(request, LEARN_HEADER) is not False
    claim.choices = getattr(body, "n", None) or 1
    prompts, field = max((count_prompts(getattr(body, name, None)), name) for name in _MANY)
    claim.sequences = claim.choices * prompts
    writes, most = not gateway.services.pooling.is_model, max(MAX_SEQUENCES, gateway.settings.gateway.max_in_flight // 2)
    if writes and claim.sequences > most:
        message = f"The request asks for more than {most} sequences, prompts times `n`."
        raise BadRequest(message, param="n" if claim.choices >= prompts else field)
    context = gateway.client.model_config.max_model_len
    size = len(request.state.body)
    prompt_tokens = min(math.ceil(size / BYTES_PER_TOKEN), prompts * context)
    output_tokens = 0
    if writes:
        output_tokens = claim.sequences * min(_longest(body) or round(gateway.client.core.response_tokens), context)
    claim.expected_tokens = max(1, prompt_tokens + output_tokens)
    gateway.quotas.spend(caller, claim.expected_tokens)
    claim.charged_tokens = claim.expected_tokens
    enter_claim(claim)
    return claim


def check_model(gateway: Gateway, request: Request, body: Any) -> None:
    """Raises `ModelNotFound` if the caller may not use the model.  The error does not tell whether the model exists."""
    if not caller_of(request).may_use(getattr(body, "model", None) or gateway.services.models.model_name()):
        raise ModelNotFound("The model does not exist, or this key has no access to it.", param="model")


def _longest(body: Any) -> int | None:
    """The request's own limit for the tokens of one output; None: it has none."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = getattr(body, name, None)
        if value:
            return int(value)
    return None


def _wait_s(text: str | None, most: float) -> float:
    if text is None:
        return most
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"The header `{WAIT_HEADER}` must be a number of seconds.", param=WAIT_HEADER)
    return min(seconds, most)
