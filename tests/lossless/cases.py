"""What engines are asked in each mode, and how their answers are compared."""

import json
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import LogprobsLists

from backend.engine.client import Answer
from backend.models.demo import TARGET_DIR
from backend.models.resolve import ResolvedModels
from backend.noise import gumbel
from backend.wire.engine import RequestOptions
from tests.support.processes import Verifier

K = 4
PROMPTS, TOKENS = 18, 96
MANY_PROMPTS = 32
"""The campaign's."""
FEW_PROMPTS, FEW_TOKENS = 8, 48
TIE_NATS = 1e-3
END_OF_TEXT = json.loads((TARGET_DIR / "config.json").read_text())["eos_token_id"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alpha", "beta", "gamma"]},
        "numbers": {"type": "array", "items": {"enum": [1, 22, 3]}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "numbers"],
    "additionalProperties": False,
}
SHARING = RequestOptions()


def start(
    directory: Path,
    mode: str,
    paths: ResolvedModels | None = None,
    *,
    engine_args: dict[str, Any] | None = None,
    **verifier: Any,
) -> Verifier:
    engine = {
        "max_logprobs": -1,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "logits_processors": ["tests.support.no_repeat:NoRepeat"] if mode != "native" else [],
        **(engine_args or {}),
    }
    settings = {"engine_args": engine, **verifier}
    return Verifier(directory, {"mode": mode, "num_speculative_tokens": K, "verifier": settings}, paths)


def python_prompts(count: int = PROMPTS) -> list[list[int]]:
    """Openings of modules of the standard library, from 24 tokens on."""
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace")[200:1000] for path in modules[:count]]
    return [tokenizer(text).input_ids[: 24 + i] for i, text in enumerate(texts)]


def structured() -> StructuredOutputsParams:
    wanted = StructuredOutputsParams(json=json.dumps(SCHEMA))
    wanted._backend = "xgrammar"
    return wanted


VARIANTS: dict[str, dict[str, Any]] = {
    "T = 0.0": {"temperature": 0.0, "max_tokens": TOKENS},
    "T = 0.7": {"temperature": 0.7, "max_tokens": TOKENS},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "top_p, top_k": {"top_p": 0.8, "top_k": 40},
    "min_p, logit_bias": {"min_p": 0.05, "logit_bias": {5: 2.5, 17: -4.0, 200: 1.5}},
    "min_tokens, bad words": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": [5, 6, 200], "_bad_words": True},
    "schema": {"ignore_eos": False, "max_tokens": 60, "_schema": True},
    "custom processor": {"extra_args": {"no_repeat": 1}},
    "logprobs": {"logprobs": 3},
}
"""What `vLLM` applies to the logits, at temperature 1 unless another is given; asked for with a few prompts."""


def request(seed: int, **fields: Any) -> SamplingParams:
    schema, bad_words = fields.pop("_schema", False), fields.pop("_bad_words", False)
    given = {"max_tokens": TOKENS, "ignore_eos": True, "seed": seed} | fields
    params = SamplingParams(**given, structured_outputs=structured() if schema else None)
    if schema:
        params.update_from_generation_config({}, END_OF_TEXT)
    if bad_words:
        params._bad_words_token_ids = [[7, 8], [9], [3, 4, 5]]
    return params


def texts(verifier: Verifier, prompts: list[list[int]], options: RequestOptions = SHARING, **fields: Any) -> list[Answer]:
    params = [request(1000 + i, **fields) for i in range(len(prompts))]
    return verifier.client.generate(prompts, params, options=options)


def all_texts(verifier: Verifier) -> dict[str, list[Answer]]:
    """At temperature 1 and greedily in batches of their own, all else in one batch of every kind."""
    prompts = python_prompts(FEW_PROMPTS)
    found = {
        "T = 1.0": texts(verifier, python_prompts(), temperature=1.0),
        "T = 0.0": texts(verifier, prompts, temperature=0.0),
    }
    others = {
        name: {"temperature": 1.0, "max_tokens": FEW_TOKENS} | fields for name, fields in VARIANTS.items() if name not in found
    }
    params = [request(1000 + i, **fields) for fields in others.values() for i in range(FEW_PROMPTS)]
    answers = verifier.client.generate(prompts * len(others), params, options=SHARING)
    return found | {name: answers[n * FEW_PROMPTS : (n + 1) * FEW_PROMPTS] for n, name in enumerate(others)}


def next_logprobs(plain: Verifier, prompt: list[int]) -> dict[int, float]:
    """By token: its log probability behind `prompt`."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    (answer,) = plain.client.generate([prompt], params)
    top = answer.outputs[0].new_logprobs
    return dict(zip(top.logprob_token_ids[0].tolist(), top.logprobs[0].tolist(), strict=True))


def lead(plain: Verifier, prompt: list[int], seed: int, temperature: float, pair: tuple[int, int]) -> float:
    """By how much the score of one of two tokens after `prompt` exceeds the other's."""
    by_token = next_logprobs(plain, prompt)
    scores = torch.tensor([by_token[token] / (temperature or 1.0) for token in pair])
    if temperature:
        scores += gumbel(torch.tensor([seed]), torch.tensor([len(prompt)]), torch.tensor([pair]))[0]
    return float((scores[0] - scores[1]).abs())


def assert_same(plain: Verifier, name: str, expected: list[Answer], found: list[Answer]) -> None:
    """Equal, but for tokens whose scores float arithmetic cannot tell apart; those are printed."""
    prompts = python_prompts(len(expected))
    for i, (prompt, plainly, otherwise) in enumerate(zip(prompts, expected, found, strict=True)):
        mine, theirs = plainly.tokens, otherwise.tokens
        if mine == theirs:
            continue
        at = next(i for i, (x, y) in enumerate(zip(mine, theirs, strict=False)) if x != y)
        assert name.startswith("T = "), f"{name}: request {i} differs at token {at}: {mine[at]} and {theirs[at]}"
        ahead = lead(plain, prompt + mine[:at], 1000 + i, float(name[4:]), (mine[at], theirs[at]))
        print(f"near tie: {name}, request {i}, token {at}: {mine[at]} and {theirs[at]} differ by {ahead:.2g} nats")
        assert ahead < TIE_NATS, f"{name}: request {i} differs at token {at} and is no numerical tie"


def furthest_of(found: list[Answer], expected: list[Answer]) -> float:
    pairs = list(zip(found, expected, strict=True))
    assert all(one.tokens == other.tokens for one, other in pairs)
    return max(abs(a - b) for pair in pairs for (a, *_), (b, *_) in zip(*map(logprobs, pair), strict=True))


def as_prompts(plain: Verifier, prompts: list[list[int]], answers: list[Answer]) -> list[Answer]:
    """These tokens, with the log probabilities that they have in a prompt: computed all at once, and nothing is drawn."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    made = []
    for each, answer in zip(plain.client.generate(whole, params), answers, strict=True):
        (found,) = [out.new_prompt_logprobs_tensors for out in each.outputs if out.new_prompt_logprobs_tensors is not None]
        rows = [row[-len(answer.tokens) :] for row in found[:3]]
        made.append(Answer(answer.tokens, outputs=[SimpleNamespace(new_logprobs=LogprobsLists(*rows, None))]))
    return made


def logprobs(answer: Answer) -> list[list[float]]:
    """Per token, the top log-probabilities."""
    return [row.tolist() for output in answer.outputs if output.new_logprobs for row in output.new_logprobs.logprobs]
