"""A request that goes on at a verifier with tokens from elsewhere comes out as if it had never been cut: real vLLM."""

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from backend.wire.engine import ADD, LOGPROBS_MODE, NOISE_SEED, Addition
from tests.lossless.cases import END_OF_TEXT, logprobs, structured
from tests.support.processes import Verifier

pytestmark = pytest.mark.engine

PROMPTS = [[5 + (7 * i + j) % 900 for j in range(8 + 30 * i)] for i in range(4)]
CUTS = (1, 7, 20)


def constrained() -> SamplingParams:
    params = SamplingParams(temperature=0, max_tokens=90, structured_outputs=structured())
    params.update_from_generation_config({}, END_OF_TEXT)
    return params


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 36, "ignore_eos": True} | fields))


KINDS = {
    "greedy": params(),
    "sampled": params(temperature=1.0, seed=-7, top_p=0.9),
    "penalties": params(presence_penalty=0.8, frequency_penalty=0.6, repetition_penalty=1.2),
    "logprobs": params(logprobs=3),
    "prompt_logprobs": params(prompt_logprobs=2, logprobs=0),
    "a grammar": constrained(),
}


@pytest.mark.parametrize("name", KINDS)
def test_resumed_equals_uninterrupted(verifier: Verifier, name: str) -> None:
    """All prompts whole, then all of them from every cut at once."""
    client, params = verifier.client, KINDS[name]
    wholes = client.generate(PROMPTS, params)
    assert {whole.finish_reason for whole in wholes} == {"stop" if name == "a grammar" else "length"}
    parts = {
        client.add(prompt, params, emitted=whole.tokens[:cut]): (whole, cut)
        for prompt, whole in zip(PROMPTS, wholes, strict=True)
        for cut in CUTS
        if cut < len(whole.tokens)
    }
    assert len(parts) >= len(PROMPTS)
    client.finish_all()
    for request_id, (whole, cut) in parts.items():
        part = client.answers.pop(request_id)
        assert part.tokens == whole.tokens[cut:]
        assert part.finish_reason == whole.finish_reason
        assert [o.new_prompt_logprobs_tensors for o in part.outputs if o.new_prompt_logprobs_tensors is not None] == []
        for got, wanted in zip(logprobs(part), logprobs(whole)[cut:], strict=True):
            assert got == pytest.approx(wanted, abs=1e-4)


def test_limits_count_what_was_emitted(verifier: Verifier) -> None:
    client = verifier.client
    # Penalties keep so small a model from repeating itself: there are tokens that come late for the first time.
    varied: dict[str, Any] = {"max_tokens": 24, "repetition_penalty": 1.3, "presence_penalty": 1.0}
    wholes = client.generate(PROMPTS, params(**varied))
    prompt, at, stop = next(
        (prompt, i, whole.tokens[i])
        for prompt, whole in zip(PROMPTS, wholes, strict=True)
        for i in range(2, 24)
        if whole.tokens[i] not in whole.tokens[:i]
    )
    # `min_tokens` are reached by what was emitted before the cut alone: the very next token may end it.
    stopping = params(**varied, stop_token_ids=[stop], min_tokens=at)
    (stopped,) = client.generate([prompt], stopping)
    assert (stopped.finish_reason, len(stopped.tokens)) == ("stop", at + 1)
    request_id = client.add(prompt, stopping, emitted=stopped.tokens[:-1])
    # Here they are not: the token is forbidden once more.
    later = client.add(prompt, params(**varied, stop_token_ids=[stop], min_tokens=at + 1), emitted=stopped.tokens[:-1])
    client.finish_all()
    part = client.answers.pop(request_id)
    assert (part.tokens, part.finish_reason) == ([stop], "stop")
    assert client.answers.pop(later).tokens[0] != stop


def test_a_client_cannot_set_what_the_verifier_tells_its_sampler(verifier: Verifier) -> None:
    with_names = params(extra_args={NOISE_SEED: "x", LOGPROBS_MODE: 5}, logprobs=0)
    answers = verifier.client.generate(PROMPTS[:2], [with_names, params(temperature=1.0)])
    assert [answer.finish_reason for answer in answers] == ["length", "length"]


def test_what_cannot_be_continued_ends_alone(verifier: Verifier) -> None:
    client = verifier.client
    bad = [
        client.add(PROMPTS[0], params(), emitted=[10**9]),
        client.add(PROMPTS[0], params(max_tokens=2), emitted=[5, 6]),
        client.add(PROMPTS[0], params(max_tokens=9000), emitted=[5] * 8000),
    ]
    not_json = client.add(PROMPTS[0], constrained(), emitted=[5, 6, 7])
    unreadable = Addition("unreadable")
    client.answers[unreadable.request_id] = type(client.answers[bad[0]])()
    client.dealer.send(ADD, msgspec.msgpack.encode(unreadable), b"\xc1nonsense")
    refused = len(client.refusals)
    client.dealer.send(ADD, b"\xc1nonsense")
    good = client.add(PROMPTS[1], params())
    client.finish_all()
    assert len(client.refusals) == refused + 1
    for request_id in (*bad, not_json, unreadable.request_id):
        assert client.answers.pop(request_id).finish_reason == "error"
    assert client.answers.pop(good).finish_reason == "length"
    stats = client.fresh_stats()
    assert (stats.running, stats.waiting) == (0, 0)
