"""Requests without a seed draw from the target's distribution in every drafting mode: chi-square over many short texts.

Texts have four tokens: the first ends the prompt's prefill, the others are judged behind drafts.  Steps take times at which the
budget cuts drafts in the middle.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from backend.config import REMOTE_MODES
from backend.models.demo import TARGET_DIR
from tests.support.draws import Exact, accepted, draw
from tests.support.processes import Drafter, Verifier, together

pytestmark = [pytest.mark.engine, pytest.mark.campaign, pytest.mark.timeout(1800)]

DRAWS, DEPTH, K = 20_000, 4, 4
SIGNIFICANT = 1e-4
"""The noise is new each time: a test of right code fails once in ten thousand runs."""
PROMPT = "import os\nimport sys\n\n\ndef main(args):\n    "
TOKEN_S = 5e-3
"""With up to 64 requests and steps of a second: draft tokens pay that are accepted one time in three, or so."""
MODEST_TOKEN_S = 5e-4
"""With steps of which about half grows with their tokens: two times in three, or so."""
CHEAP_TOKEN_S = 1e-4
"""So whole drafts are verified, also where they are mostly rejected."""
KINDS: dict[str, dict[str, Any]] = {
    "T = 1": {},
    "T = 0.7": {"temperature": 0.7},
    "top_k, top_p": {"top_k": 40, "top_p": 0.8},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    # Tokens that no draft has.  Token 0 is among them: the number that decides about a first draft token must not be its noise.
    "logit_bias": {"logit_bias": {0: 11.0, 8: 12.5, 64: 13.0}},
    "grammar": {"structured_outputs": "[a-f]{2,4}"},
}


def request(seed: int | None = None, **fields: Any) -> SamplingParams:
    if "structured_outputs" in fields:
        wanted = StructuredOutputsParams(regex=fields["structured_outputs"])
        wanted._backend = "xgrammar"
        fields["structured_outputs"] = wanted
    return SamplingParams(**{"temperature": 1.0, "max_tokens": DEPTH, "ignore_eos": True, "seed": seed} | fields)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    found: list[int] = AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids
    return found


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    with Drafter(tmp_path_factory.mktemp("d")) as started:
        yield started


def start(directory: Path, mode: str, token_s: float = TOKEN_S) -> Verifier:
    verifier = {"max_num_seqs": 64, "engine_args": {"max_logprobs": -1}}
    return Verifier(directory, {"mode": mode, "num_speculative_tokens": K, "verifier": verifier}, token_s=token_s)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    with start(tmp_path_factory.mktemp("p"), "off") as started:
        yield started


@pytest.fixture(params=sorted(REMOTE_MODES))
def verifier(request: pytest.FixtureRequest, tmp_path: Path, drafter: Drafter) -> Iterator[Verifier]:
    # Where all of a step's time grows with its tokens, `auto` drafts next to nothing, and rightly so.
    with start(tmp_path, request.param, MODEST_TOKEN_S if request.param == "auto" else TOKEN_S) as started:
        started.set_drafters(drafter.ref)
        yield started


def test_alone(verifier: Verifier, plain: Verifier, prompt: list[int]) -> None:
    draw_alone(verifier, plain, prompt, request())


def test_drafts_that_are_mostly_rejected(plain: Verifier, drafter: Drafter, prompt: list[int], tmp_path: Path) -> None:
    with start(tmp_path, "sync", CHEAP_TOKEN_S) as verifier:
        verifier.set_drafters(drafter.ref)
        draw_alone(verifier, plain, prompt, request(**KINDS["logit_bias"]))


def draw_alone(verifier: Verifier, plain: Verifier, prompt: list[int], params: SamplingParams) -> None:
    found = draw(verifier, prompt, [params] * DRAWS)
    p_value = Exact(plain, prompt, params, DEPTH, DRAWS).p_value(found)
    drafted, right = accepted(verifier)
    print(f"{DRAWS} texts: p = {p_value:.3g}; {drafted} draft tokens verified, {right} accepted")
    assert drafted > DRAWS / 2, "it really drafted"
    assert p_value > SIGNIFICANT


def test_in_mixed_batches(verifier: Verifier, plain: Verifier, prompt: list[int]) -> None:
    """Every kind of request in each batch, and among them greedy ones and such with a seed."""
    others = [{"temperature": 0}, {"seed": 1}]
    turns = [*KINDS.values(), *others]
    each = DRAWS // len(KINDS)
    params = [request(**({**fields, "seed": i} if "seed" in fields else fields)) for i in range(each) for fields in turns]
    found = draw(verifier, prompt, params)
    p_values = {}
    for place, (name, fields) in enumerate(KINDS.items()):
        exact = Exact(plain, prompt, request(**fields), DEPTH, each)
        p_values[name] = exact.p_value([text + [0] * (DEPTH - len(text)) for text in found[place :: len(turns)]])
    drafted, right = accepted(verifier)
    shown = {name: f"{p:.3g}" for name, p in p_values.items()}
    print(f"{each} texts of each kind: {shown}; {drafted} draft tokens verified, {right} accepted")
    assert min(p_values.values()) * len(p_values) > SIGNIFICANT


def test_over_a_failover_in_mid_draft(plain: Verifier, drafter: Drafter, prompt: list[int], tmp_path: Path) -> None:
    """Requests leave a verifier after their first verification and go on at another, which draws anew."""
    with together(*(partial(start, tmp_path, "sync") for _ in range(2))) as (first, second):
        for each in (first, second):
            each.set_drafters(drafter.ref)
        drawn: list[list[int]] = []
        moved = 0
        for _ in range(DRAWS // 500):
            texts, movers = moved_texts(first, second, prompt, 500)
            drawn, moved = drawn + texts, moved + movers
        p_value = Exact(plain, prompt, request(), DEPTH, len(drawn)).p_value(drawn)
        print(f"{len(drawn)} texts, {moved} of them moved: p = {p_value:.3g}")
        assert moved > DRAWS / 4
        assert p_value > SIGNIFICANT


def moved_texts(first: Verifier, second: Verifier, prompt: list[int], count: int) -> tuple[list[list[int]], int]:
    """Texts of twice the usual length; those still running after a verification are moved."""
    params = request(max_tokens=2 * DEPTH)
    here, there = first.client, second.client
    ids, moved = [here.add(prompt, request(max_tokens=2 * DEPTH)) for _ in range(count)], dict[str, list[int]]()

    def all_done() -> bool:
        for each in ids:
            answer = here.answers[each]
            if len(answer.tokens) > 1 and answer.finish_reason is None and each not in moved:
                moved[each] = list(answer.tokens)
                here.abort(each)
                there.add(prompt, params, each, moved[each])
        return all(each in moved or here.answers[each].finish_reason is not None for each in ids)

    here.run_until(all_done)
    there.finish_all()
    texts = [moved[each] + there.answers.pop(each).tokens if each in moved else here.answers[each].tokens for each in ids]
    here.answers.clear()
    return texts, len(moved)
