"""Adds requests to the engine, also requests that another verifier has begun.  Engine process, engine thread.

A moved request comes with the tokens its client already has.  They stay *output* tokens, as vLLM treats the tokens of a request
that it has preempted.  The prefill runs over prompt and output; penalties, `min_tokens`, `max_tokens`, stop tokens and the
grammar continue from there.  vLLM's model runner starts every request without output.  So the scheduler passes these tokens on
(`counting.py`) and the runner takes them in (`runner.ResumedOutputs`).

A request with a seed continues exactly as it would have, because its noise depends only on the seed and each token's position.
A request without one continues with new noise: what the verifier before had drawn must not be judged again.
Mode `native` has vLLM's own sampler, whose generator cannot be restored.  There a seeded request continues with a new seed,
derived from the first seed and the number of tokens emitted: the distribution is the same, the tokens are not.
"""

import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm.sampling_params import SamplingType
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from backend.engine.observers import RequestState
from backend.engine.worker.fixed import fixed_response
from backend.speculation.chances import Rule
from backend.wire.engine import GREEDY_BELOW, INDEPENDENT, LOGPROBS_MODE, NOISE_SEED, NOT_LEARNED, RequestOptions


def add_request(
    core: EngineCore, request: EngineCoreRequest, emitted: Sequence[int] = (), options: RequestOptions | None = None
) -> None:
    """Adds `request` to the engine, to continue after its `emitted` output tokens; `options` as in `Addition`.

    Raises what vLLM raises for a request that it refuses, and `ValueError` if `emitted` cannot be the request's output.
    """
    if emitted:
        _check(core, request, emitted)
    options = options or RequestOptions()
    _check_vocabulary(core, options.prediction, "a token of the prediction")
    # A pooling request has no such parameters.
    if request.sampling_params is not None:
        shares_noise = core.vllm_config.additional_config["outrider"]["shared_noise"]
        _complete(request.sampling_params, shares_noise, len(emitted), options)
    made, wave = core.preprocess_add_request(request)
    made.outrider = RequestState(options, acceptance_rule(made.sampling_params))
    if emitted:
        made.append_output_token_ids(list(emitted))
        # The verifier that began the request has counted its prompt and reported its cached tokens.
        made.prefill_stats = None
        if made.use_structured_output:
            # The request waits until its grammar is compiled *and* has accepted the `emitted` tokens.  Both happen on threads
            # of vLLM's manager: a slow grammar must not delay the steps of other requests.
            structured, manager = made.structured_output_request, core.structured_output_manager
            structured.grammar = manager.executor.submit(_advanced, manager, made, structured._grammar, list(emitted))
    core.add_request(made, wave)


def _complete(params: Any, shares_noise: bool, emitted: int, options: RequestOptions) -> None:
    """Adds to a request's parameters what the sampler and the runner must know."""
    if emitted:
        # The prompt's log probabilities were sent with the first token.
        params.prompt_logprobs = None
    # Clients may pass extra arguments (`vllm_xargs`), but these belong to the verifier.
    own = {NOISE_SEED, INDEPENDENT, LOGPROBS_MODE, NOT_LEARNED}
    arguments = {name: value for name, value in (params.extra_args or {}).items() if name not in own}
    if shares_noise:
        arguments |= _noise(params)
    elif emitted and params.seed is not None:
        params.seed = continued_seed(params.seed, emitted)
    if options.logprobs_mode is not None:
        arguments[LOGPROBS_MODE] = options.logprobs_mode
    if not options.learn:
        arguments[NOT_LEARNED] = True
    params.extra_args = arguments or None


def continued_seed(seed: int, emitted: int) -> int:
    """The seed for a request that continues after `emitted` tokens.  Reusing `seed` would repeat the first draws."""
    digest = hashlib.blake2b(f"{seed}/{emitted}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _check(core: EngineCore, request: EngineCoreRequest, emitted: Sequence[int]) -> None:
    params = request.sampling_params
    if params is None:
        raise ValueError("only a request that generates tokens can be continued")
    _check_vocabulary(core, emitted, "a token to continue after")
    if params.max_tokens is not None and len(emitted) >= params.max_tokens:
        raise ValueError("nothing is left to generate")
    prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    if prompt + len(emitted) >= core.vllm_config.model_config.max_model_len:
        raise ValueError("the request is longer than this verifier's context")


def _check_vocabulary(core: EngineCore, tokens: Sequence[int], name: str) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < core.vllm_config.model_config.get_vocab_size():
        raise ValueError(f"{name} is not in the vocabulary")


def _noise(params: Any) -> dict[str, Any]:
    """The arguments that say how a sampled request's drafts are judged, with its seed, which `params` loses.

    vLLM would create an unused generator from `params.seed`.
    """
    # `sampling_type` must not be read here: vLLM caches its value, and would still create the generator.
    if params.temperature < GREEDY_BELOW:
        return {}
    seed, params.seed = params.seed, None
    # vLLM cuts drafts before the first token that a grammar forbids.  That decision has seen the token, so only drafts that
    # decide nothing may be cut so.
    is_independent = seed is None and params.structured_outputs is None and fixed_response(params) is None
    noise = {NOISE_SEED: secrets.randbits(64) if seed is None else seed % 2**64}
    return noise | {INDEPENDENT: True} if is_independent else noise


def acceptance_rule(params: Any) -> Rule:
    """How a request's drafts are judged, by its parameters after `add_request`."""
    if params is None or params.sampling_type == SamplingType.GREEDY:
        return Rule.GREEDY
    shares_noise = params.extra_args and NOISE_SEED in params.extra_args and INDEPENDENT not in params.extra_args
    # vLLM's own sampler has no shared noise.
    return Rule.SHARED if shares_noise else Rule.INDEPENDENT


def _advanced(manager: Any, request: Any, compiled: Any, emitted: list[int]) -> Any:
    # The pool is first in, first out: compilation was submitted before this call, so waiting here cannot block it.
    grammar = compiled.result() if isinstance(compiled, Future) else compiled
    start, _ = manager._get_constraint_bounds(request, emitted, spec_tokens_committed=True)
    if start > len(emitted):
        return grammar
    request.structured_output_request.reasoning_ended = True
    if not grammar.accept_tokens(request.request_id, emitted[start:]):
        raise ValueError("the grammar does not accept what was emitted")
    return grammar
