"""A request's answer in a batch of any others is its answer alone, whatever each of them asks."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

from backend.config import Settings
from backend.engine.arguments import adapter_number
from backend.engine.client import Answer
from backend.engine.front.offline import OFFERED, OfflineProcessor
from backend.models.demo import TARGET_DIR
from tests.support.processes import Verifier

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BATCH = 16
BATCHES = 3
NOT_OF_THE_ENGINE = {"include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "stop"}
"""Of the sampling parameters; gateways see to them.  `thinking_token_budget` needs a model that thinks."""
PROMPTS = [
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef main(args):\n    for each in args:\n",
]
DEAD_END = {"structured_outputs": {"choice": ["    a = 1\n    b = 2\n"]}, "stop_token_ids": [201]}
PARAMETERS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.0, 0.6, 1.0, 1.4],
    "top_p": [0.7, 0.95],
    "top_k": [1, 5, 40],
    "min_p": [0.02, 0.2],
    "presence_penalty": [-0.5, 1.0],
    "frequency_penalty": [-0.3, 0.8],
    "repetition_penalty": [0.9, 1.3],
    "logit_bias": [{"5": 3.0, "17": -100.0}, {"201": -2.0}],
    "allowed_token_ids": [list(range(200, 900)), [201, 300, 400]],
    "bad_words": [[" self", "return"], ["x", "import os"]],
    "min_tokens": [3, 9],
    "max_tokens": [9, 20, 30],
    "stop_token_ids": [[201], [5, 6, 250]],
    "ignore_eos": [True],
    "logprobs": [0, 3, 20, -1],
    "logprob_token_ids": [[5], [201, 7, 300]],
    "prompt_logprobs": [0, 4],
    "repetition_detection": [{"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3}],
    "extra_args": [{"outrider_logprobs_mode": "processed_logprobs"}],
    "structured_outputs": [
        {"regex": "[a-c]{3,9}(-[0-9]{2}){1,4}"},
        {"choice": ["one", "two three four five", "six"]},
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        {"grammar": 'root ::= ("x" | "y" root) "\\n"'},
    ],
}
"""Of each sampling parameter, what requests may ask; all fields that `vLLM` applies."""


def drawn_requests(seed: int) -> list[tuple[str, dict[str, Any]]]:
    drawn = random.Random(seed)
    made: list[tuple[str, dict[str, Any]]] = [(PROMPTS[0], {"temperature": 0.0, "max_tokens": 20, **DEAD_END})]
    while len(made) < BATCH:
        names = drawn.sample(sorted(PARAMETERS), drawn.randint(0, 6))
        given = {name: drawn.choice(PARAMETERS[name]) for name in names}
        if "logprob_token_ids" in given and "logprobs" in given:
            given["logprobs"] = len(given["logprob_token_ids"])
        made.append((drawn.choice(PROMPTS), {"temperature": 1.0, "max_tokens": 20, **given, "seed": drawn.randrange(1 << 40)}))
    return made


@pytest.fixture(scope="module")
def front() -> OfflineProcessor:
    settings = {"mode": "off", "verifier": {"engine_args": {"max_logprobs": -1}}}
    return OfflineProcessor(Settings.model_validate(settings), str(TARGET_DIR))


Request = tuple[list[int], SamplingParams, LoRARequest | None]


@pytest.fixture(scope="module")
def batches(front: OfflineProcessor, adapter: Path) -> list[list[Request]]:
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
    lora = LoRARequest("a", adapter_number("a", str(adapter)), str(adapter))
    made = []
    for seed in range(BATCHES):
        batch: list[Request] = []
        for text, given in drawn_requests(seed):
            prompt = tokenizer.encode(text)
            extra = given.pop("extra_args", None)
            params = front.params(prompt, given)
            params.extra_args = extra
            batch.append((prompt, params, lora if len(batch) % 3 == 1 else None))
        made.append(batch)
    return made


def answers(verifier: Verifier, batch: list[Request]) -> list[Answer]:
    client = verifier.client
    ids = [client.add(prompt, params.clone(), lora_request=adapter) for prompt, params, adapter in batch]
    client.finish_all()
    return [client.answers.pop(each) for each in ids]


@pytest.fixture(scope="module")
def alone(plain: Verifier, batches: list[list[Request]]) -> list[list[Answer]]:
    return [[answers(plain, [each])[0] for each in batch] for batch in batches]


def test_every_sampling_parameter_is_asked_for() -> None:
    assert OFFERED - NOT_OF_THE_ENGINE - {"seed", "thinking_token_budget", "watermarking"} == PARAMETERS.keys()


def test_each_answer_in_a_mixed_batch_is_its_answer_alone(
    verifier: Verifier, batches: list[list[Request]], alone: list[list[Answer]]
) -> None:
    for batch, expected in zip(batches, alone, strict=True):
        for (_, params, _), mine, theirs in zip(batch, expected, answers(verifier, batch), strict=True):
            assert (theirs.tokens, theirs.finish_reason) == (mine.tokens, mine.finish_reason), params
            near = [pytest.approx(each, rel=1e-3, abs=1e-3) for each in logprobs(mine, params)]
            assert logprobs(theirs, params) == near, params


def logprobs(answer: Answer, params: SamplingParams) -> list[dict[int, float]]:
    """Those of each token, then of the prompt's tokens, as many as were asked for: rows are as long as the batch's longest.

    What cannot be drawn is left out: which of it is named is chance.
    """
    found = []
    for output in answer.outputs:
        for rows, count in (
            (output.new_logprobs, params.num_logprobs),
            (output.new_prompt_logprobs_tensors, params.prompt_logprobs),
        ):
            end = None if count in (None, -1) else count + 1
            for ids, values in zip(rows[0].tolist(), rows[1].tolist(), strict=True) if rows is not None else ():
                pairs = zip(ids[:end], values[:end], strict=True)
                found.append({token: value for token, value in pairs if math.isfinite(value)})
    return found


def test_where_a_grammar_and_other_rules_leave_no_token_the_answer_ends(
    front: OfflineProcessor, engines: dict[str, Verifier]
) -> None:
    """What the grammar could end with is whole."""
    tokenizer = AutoTokenizer.from_pretrained(str(TARGET_DIR))
    cases: list[tuple[dict[str, Any], str]] = [
        (DEAD_END, "length"),
        ({"structured_outputs": {"choice": ["abc"]}, "min_tokens": 15}, "stop"),
        ({"structured_outputs": {"regex": "[a-c]{4}"}, "allowed_token_ids": tokenizer.encode("x")}, "length"),
        ({"structured_outputs": {"choice": ["abc"]}, "bad_words": ["c", "abc", "bc"]}, "length"),
        ({"structured_outputs": {"choice": ["abc"]}, "temperature": 1.0, "logprobs": 2, "min_tokens": 15}, "stop"),
    ]
    prompt = tokenizer.encode(PROMPTS[0])
    batch = [(prompt, front.params(prompt, {"temperature": 0.0, "max_tokens": 20, **given}), None) for given, _ in cases]
    for verifier in engines.values():
        found = answers(verifier, batch)
        for (given, reason), answer in zip(cases, found, strict=True):
            assert str(answer.finish_reason) == reason, given
            rows = [row for output in answer.outputs if output.new_logprobs for row in output.new_logprobs.logprobs]
            assert len(rows) == len(answer.tokens) * ("logprobs" in given), given
        texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in found]
        assert texts[1] == texts[4] == "abc"
        assert "    a = 1\n    b = 2\n".startswith(texts[0])
