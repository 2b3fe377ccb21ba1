"""Takes a request into the engine, also one that another verifier has begun.  Engine process, engine thread.

A moved request comes with the tokens its client already has.  They are *output* tokens here too, exactly as vLLM treats those
of a request it has preempted: the prefill runs over prompt and output, and penalties, `min_tokens`, `max_tokens`, stop tokens
and the grammar go on where they were.  vLLM's own model runner starts every request without output, so the scheduler names
the tokens in its output (`counting.py`) and the runner takes them in (`runner.ResumedOutputs`).

A sampled request goes on exactly as it would have: its noise is a function of its seed and of the token's place.  Mode `native`
keeps vLLM's own sampler, whose generator cannot be put back to where it was.  There a seeded request goes on with a new seed,
which follows from the first one and the place of the cut: the distribution is the same, the very tokens are not.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore

from backend.wire.engine import GREEDY_BELOW, LOGPROBS_MODE, NOISE_SEED, NOT_LEARNED, Asked


def add_request(
    core: EngineCore,
    request: EngineCoreRequest,
    emitted: Sequence[int] = (),
    noise_seed: int | None = None,
    asked: Asked | None = None,
) -> None:
    """Adds `request` to the engine, to go on after its `emitted` output tokens; `noise_seed` and `asked` as in `Addition`.

    Raises what vLLM raises for a request it cannot take, and `ValueError` when the tokens cannot be its output.
    """
    if emitted:
        _check(core, request, emitted)
        # They left with the first token.
        request.sampling_params.prompt_logprobs = None
    if request.sampling_params is not None and request.sampling_params.extra_args:
        # Clients may name arguments, too (`vllm_xargs`); these are the verifier's.
        theirs = request.sampling_params.extra_args
        request.sampling_params.extra_args = {name: theirs[name] for name in theirs.keys() - {NOISE_SEED, LOGPROBS_MODE}}
    if request.sampling_params is None:
        # It embeds or scores, and draws nothing.
        pass
    elif core.vllm_config.additional_config["outrider"]["shared_noise"]:
        _seed(request.sampling_params, noise_seed)
    elif emitted and request.sampling_params.seed is not None:
        request.sampling_params.seed = continued_seed(request.sampling_params.seed, len(emitted))
    if asked is not None:
        _check_vocabulary(core, asked.prediction, "a token of the prediction")
        if asked.logprobs_mode is not None and request.sampling_params is not None:
            _add_argument(request.sampling_params, LOGPROBS_MODE, asked.logprobs_mode)
        if not asked.learn and request.sampling_params is not None:
            _add_argument(request.sampling_params, NOT_LEARNED, True)
    made, wave = core.preprocess_add_request(request)
    made.outrider = asked
    if emitted:
        made.append_output_token_ids(list(emitted))
        # Its prompt was counted where the request began, and the client's usage has been told of cached tokens.
        made.prefill_stats = None
        if made.use_structured_output:
            _advance_grammar(core.structured_output_manager, made, list(emitted))
    core.add_request(made, wave)


def continued_seed(seed: int, emitted: int) -> int:
    """The seed of a request that goes on after `emitted` tokens: never the first one again, which would repeat its draws."""
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


def _seed(params: Any, noise_seed: int | None) -> None:
    """Moves the seed to where our sampler reads it: vLLM would make a generator of it, which nobody draws from."""
    # Not `sampling_type`: vLLM keeps what it once said, and would make the generator all the same.
    if params.temperature < GREEDY_BELOW:
        return
    seed = params.seed if params.seed is not None else noise_seed
    seed = secrets.randbits(64) if seed is None else seed % 2**64
    _add_argument(params, NOISE_SEED, seed)
    params.seed = None


def _add_argument(params: Any, name: str, value: Any) -> None:
    params.extra_args = {**(params.extra_args or {}), name: value}


def _advance_grammar(manager: Any, request: Any, emitted: list[int]) -> None:
    """The request waits for its grammar until it has been compiled *and* has accepted what was emitted.

    Both happen on the manager's own threads: one that compiles slowly must not hold up everybody's step.
    """
    structured = request.structured_output_request
    compiled = structured._grammar
    structured.grammar = manager.executor.submit(_advanced, manager, request, compiled, emitted)


def _advanced(manager: Any, request: Any, compiled: Any, emitted: list[int]) -> Any:
    # First in, first out: whatever compiles it was submitted before this, so waiting here cannot block its thread.
    grammar = compiled.result() if isinstance(compiled, Future) else compiled
    start, _ = manager._get_constraint_bounds(request, emitted, spec_tokens_committed=True)
    if start > len(emitted):
        return grammar
    request.structured_output_request.reasoning_ended = True
    if not grammar.accept_tokens(request.request_id, emitted[start:]):
        raise ValueError("the grammar does not accept what was emitted")
    return grammar
