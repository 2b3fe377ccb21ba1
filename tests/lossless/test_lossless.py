"""Speculation changes no token: the same seed gives the same text in every mode, and plain decoding draws from p."""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import LogprobsLists

from backend.config import REMOTE_MODES
from backend.engine.client import Answer
from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels
from backend.noise import choose, gumbel
from backend.wire.engine import Account, RequestOptions
from tests.support.drafter_heads import write_unigram_head
from tests.support.draws import Exact, draw
from tests.support.other_vocabulary import write_permuted
from tests.support.processes import Drafter, Verifier, together
from tests.support.statistics import chi_square, chi_square_tail

pytestmark = pytest.mark.engine

K = 4
PROMPTS, TOKENS = 32, 128
FEW_PROMPTS, FEW_TOKENS = 8, 48
FEWER = ("T = 0.0", "T = 0.7")
"""Asked for with a few prompts only; the campaign asks for them with all."""
SAMPLES, MANY_SAMPLES, BATCH = 2_500, 60_000, 500
MANY_LOGPROBS = 1_000
TIE_NATS = 1e-3
SIGNIFICANT = 0.01
"""Too little noise is a thousand times as significant with as many samples.  The draws are fixed by the requests' seeds: the
outcome is the same every time."""
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
MODES = ("off", "sync", "ahead", "auto", "native")


def start(directory: Path, mode: str, paths: ResolvedModels | None = None) -> Verifier:
    engine_args: dict[str, Any] = {
        "max_logprobs": -1,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "logits_processors": ["tests.support.no_repeat:NoRepeat"] if mode != "native" else [],
    }
    return Verifier(
        directory,
        {"mode": mode, "num_speculative_tokens": K, "verifier": {"draft_deadline_ms": 2000, "engine_args": engine_args}},
        paths,
    )


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """The demo's head."""
    started = Drafter(tmp_path_factory.mktemp("d"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, drafter: Drafter) -> Iterator[dict[str, Verifier]]:
    """A verifier of each mode, two loading at a time; one drafter answers those that draft remotely."""
    directory = tmp_path_factory.mktemp("l")
    started = dict(zip(MODES, together(*(partial(start, directory, mode) for mode in MODES)), strict=True))
    for mode in REMOTE_MODES:
        started[mode].set_drafters(drafter.ref)
    yield started
    together(*(child.close for child in started.values()))


@dataclass
class Said:
    """What one engine answered."""

    texts: dict[str, list[Answer]] = field(default_factory=dict)
    draws: list[tuple[int, int]] = field(default_factory=list)


def ask(verifier: Verifier, mode: str) -> Said:
    """Everything a mode is asked: texts, and draws of plain decoding."""
    if mode == "native":
        return Said({"T = 0.0": texts(verifier, python_prompts(FEW_PROMPTS), temperature=0.0)})
    return Said(all_texts(verifier), samples(verifier, SAMPLES) if mode == "off" else [])


@pytest.fixture(scope="module")
def said(engines: dict[str, Verifier]) -> Iterator[dict[str, Future[Said]]]:
    """What each mode says; two engines work at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {mode: pool.submit(ask, verifier, mode) for mode, verifier in engines.items()}


@pytest.fixture(scope="module")
def plain(engines: dict[str, Verifier], said: dict[str, Future[Said]]) -> Verifier:
    """Plain decoding, when it has answered: one thread at a time talks to an engine."""
    said["off"].result()
    return engines["off"]


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


def texts(verifier: Verifier, prompts: list[list[int]], asked: RequestOptions = SHARING, **fields: Any) -> list[Answer]:
    params = [request(1000 + i, **fields) for i in range(len(prompts))]
    return verifier.client.generate(prompts, params, asked=asked)


def all_texts(verifier: Verifier) -> dict[str, list[Answer]]:
    found = {"T = 1.0": texts(verifier, python_prompts(), temperature=1.0)}
    for name, fields in VARIANTS.items():
        few = {"temperature": 1.0, "max_tokens": FEW_TOKENS} | fields
        found[name] = texts(verifier, python_prompts(FEW_PROMPTS), **few)
    return found


@pytest.fixture(scope="module")
def expected(said: dict[str, Future[Said]]) -> dict[str, list[Answer]]:
    """What plain decoding says."""
    found = said["off"].result().texts
    tokens = {name: [answer.tokens for answer in answers] for name, answers in found.items()}
    assert {len(text) for name in ("T = 1.0", *FEWER) for text in tokens[name]} == {TOKENS}
    assert tokens["T = 1.0"][:FEW_PROMPTS] != tokens["T = 0.7"] != tokens["T = 0.0"]
    return found


def lead(plain: Verifier, prompt: list[int], seed: int, temperature: float, pair: tuple[int, int]) -> float:
    """By how much the score of one of two tokens after `prompt` exceeds the other's."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    (answer,) = plain.client.generate([prompt], params)
    top = answer.outputs[0].new_logprobs
    by_token = dict(zip(top.logprob_token_ids[0].tolist(), top.logprobs[0].tolist(), strict=True))
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


def accepted(verifier: Verifier) -> int:
    return sum(drafter.accepted_tokens for drafter in verifier.client.fresh_stats().drafters.values())


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_every_mode_says_what_plain_decoding_says(
    engines: dict[str, Verifier], plain: Verifier, said: dict[str, Future[Said]], expected: dict[str, list[Answer]], mode: str
) -> None:
    for name, found in said[mode].result().texts.items():
        assert_same(plain, name, expected[name], found)
    assert accepted(engines[mode]) > PROMPTS * TOKENS / 4, "it really speculated"


def test_native_greedy_text_is_the_same(
    engines: dict[str, Verifier], plain: Verifier, said: dict[str, Future[Said]], expected: dict[str, list[Answer]]
) -> None:
    assert_same(plain, "T = 0.0", expected["T = 0.0"], said["native"].result().texts["T = 0.0"])
    assert accepted(engines["native"]) > FEW_PROMPTS


@pytest.mark.campaign
@pytest.mark.parametrize("name", FEWER)
def test_every_mode_says_it_to_all_prompts(
    engines: dict[str, Verifier], plain: Verifier, said: dict[str, Future[Said]], name: str
) -> None:
    fields = VARIANTS[name]
    expected = texts(plain, python_prompts(), **fields)
    for mode in sorted(engines.keys() - {"off"} if name == "T = 0.0" else REMOTE_MODES):
        said[mode].result()
        assert_same(plain, name, expected, texts(engines[mode], python_prompts(), **fields))


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """A small language model that drafts from tokens alone."""
    drafter = Drafter(tmp_path_factory.mktemp("m"), draft_model=str(DRAFT_MODEL_DIR))
    yield drafter
    drafter.close()


def drafted_by(
    draft_model: Drafter,
    drafter: Drafter,
    verifier: Verifier,
    plain: Verifier,
    expected: dict[str, list[Answer]],
    temperature: float,
) -> tuple[int, int]:
    """Asks with this draft model for what plain decoding has said; its draft tokens, and how many of them were accepted."""
    verifier.set_drafters(draft_model.ref)
    before, name = verifier.client.fresh_stats().drafters["drafter-0"], f"T = {temperature}"
    # Otherwise the earlier answers to these prompts would draft.
    found = texts(verifier, python_prompts(FEW_PROMPTS), asked=RequestOptions(learn=False), temperature=temperature)
    assert_same(plain, name, expected[name][:FEW_PROMPTS], found)
    after = verifier.client.fresh_stats().drafters["drafter-0"]
    drafted, right = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    print(f"{name}: {right} of {drafted} draft tokens accepted")
    verifier.set_drafters(drafter.ref)
    return drafted, right


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_with_a_draft_model_every_mode_says_the_same(
    engines: dict[str, Verifier],
    plain: Verifier,
    said: dict[str, Future[Said]],
    expected: dict[str, list[Answer]],
    draft_model: Drafter,
    drafter: Drafter,
    mode: str,
) -> None:
    said[mode].result()
    found = [drafted_by(draft_model, drafter, engines[mode], plain, expected, temperature) for temperature in (0.0, 1.0)]
    assert sum(right for _, right in found) > 0


@pytest.mark.parametrize(("renamed", "least"), [(None, 0.98), (range(1900, 2048), 0.8)])
def test_a_draft_model_that_is_the_target_is_always_right(
    renamed: range | None,
    least: float,
    engines: dict[str, Verifier],
    plain: Verifier,
    said: dict[str, Future[Said]],
    expected: dict[str, list[Answer]],
    drafter: Drafter,
    tmp_path: Path,
) -> None:
    """With other ids, too; but if some of its tokens have other names, then it does not know them in the text."""
    said["sync"].result()
    model = TARGET_DIR if renamed is None else write_permuted(TARGET_DIR, tmp_path / "permuted", renamed)
    itself = Drafter(tmp_path, draft_model=str(model))
    try:
        found = [drafted_by(itself, drafter, engines["sync"], plain, expected, temperature) for temperature in (0.0, 1.0)]
        # Together, because look-ups leave few drafts of greedy text.  But for near ties: the noise is the same too.
        drafted, right = (sum(each) for each in zip(*found, strict=True))
        assert right > least * drafted > FEW_PROMPTS
    finally:
        itself.close()


EACH = 3
"""Requests of each wish."""


def wishes(text: list[int]) -> list[RequestOptions]:
    """Everything that a request may ask of speculation; predictions are right, right in part, and wrong."""
    spoiled = [*text[:20], 7, 7, *text[30:60], *text[:20]]
    predictions = (text, spoiled, text[::-1])
    return [
        *(RequestOptions(True, mode) for mode in ("off", "sync", "ahead")),
        *(RequestOptions(True, longest=longest) for longest in (0, 1)),
        *(RequestOptions(True, prediction=tokens, learn=False) for tokens in predictions),
        RequestOptions(True),
    ]


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_what_requests_ask_of_speculation_changes_no_token(
    engines: dict[str, Verifier], plain: Verifier, said: dict[str, Future[Said]], expected: dict[str, list[Answer]], mode: str
) -> None:
    said[mode].result()
    client, truth, count = engines[mode].client, expected["T = 1.0"], len(wishes([]))
    ids = []
    for i, prompt in enumerate(python_prompts(EACH * count)):
        asked = wishes(truth[i].tokens)[i % count]
        ids.append(client.add(prompt, request(1000 + i, temperature=1.0), asked=asked))
    client.finish_all()
    found = [client.answers.pop(each) for each in ids]
    assert_same(plain, "T = 1.0", truth[: EACH * count], found)
    accounts = [each.account or Account("") for each in found]
    brought = [each.tokens / each.verifications for each in accounts]
    by_wish = [sum(brought[i::count]) / EACH for i in range(count)]
    assert by_wish[0] == by_wish[3] == 1.0, "no drafts"
    assert 1.0 < by_wish[4] <= 2.0, "one token each"
    true = [tally for each in accounts[5::count] for tally in each.tallies if tally.source == "prediction"]
    assert sum(tally.accepted for tally in true) == sum(tally.drafted for tally in true) > 0, "of it, all is accepted"
    shared = [tally for each in accounts[8::count] for tally in each.tallies if tally.source == "shared"]
    assert sum(tally.accepted for tally in shared) > EACH * TOKENS / 8, "the first answers to these prompts draft"


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_logprobs_are_the_same_with_and_without_speculation(
    said: dict[str, Future[Said]], expected: dict[str, list[Answer]], mode: str
) -> None:
    for mine, theirs in zip(expected["logprobs"], said[mode].result().texts["logprobs"], strict=True):
        assert mine.tokens == theirs.tokens
        pairs = list(zip(_logprobs(mine), _logprobs(theirs), strict=True))
        assert len(pairs) == FEW_TOKENS
        assert max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)) < 1e-4


@pytest.mark.campaign
def test_logprobs_of_a_thousand_sampled_tokens(
    engines: dict[str, Verifier], plain: Verifier, said: dict[str, Future[Said]]
) -> None:
    """Native draws other tokens: what it says of them is compared with what plain decoding's engine says of the same tokens."""
    prompts = python_prompts(MANY_LOGPROBS // TOKENS + 1)
    expected = texts(plain, prompts, temperature=1.0, logprobs=0)
    furthest = {"off, as a prompt": _furthest(expected, _as_prompts(plain, prompts, expected))}
    for mode in sorted(REMOTE_MODES):
        said[mode].result()
        furthest[mode] = _furthest(texts(engines[mode], prompts, temperature=1.0, logprobs=0), expected)
    said["native"].result()
    native = texts(engines["native"], prompts, temperature=1.0, logprobs=0)
    furthest["native"] = _furthest(native, _as_prompts(plain, prompts, native))
    print(f"logprobs of {len(prompts) * TOKENS} tokens differ by at most:", {k: f"{v:.2g}" for k, v in furthest.items()})
    assert max(furthest.values()) < 1e-4


def _furthest(found: list[Answer], expected: list[Answer]) -> float:
    pairs = list(zip(found, expected, strict=True))
    assert all(one.tokens == other.tokens for one, other in pairs)
    return max(abs(a - b) for pair in pairs for (a, *_), (b, *_) in zip(*map(_logprobs, pair), strict=True))


def _as_prompts(plain: Verifier, prompts: list[list[int]], answers: list[Answer]) -> list[Answer]:
    """These tokens, with the log probabilities that they have in a prompt: computed all at once, and nothing is drawn."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = [prompt + answer.tokens for prompt, answer in zip(prompts, answers, strict=True)]
    made = []
    for each, answer in zip(plain.client.generate(whole, params), answers, strict=True):
        (found,) = [out.new_prompt_logprobs_tensors for out in each.outputs if out.new_prompt_logprobs_tensors is not None]
        rows = [row[-len(answer.tokens) :] for row in found[:3]]
        made.append(Answer(answer.tokens, outputs=[SimpleNamespace(new_logprobs=LogprobsLists(*rows, None))]))
    return made


def _logprobs(answer: Answer) -> list[list[float]]:
    return [row.tolist() for output in answer.outputs if output.new_logprobs for row in output.new_logprobs.logprobs]


# -- plain decoding draws from p ---------------------------------------------------------------------------------------

FEW_SAMPLES = 1_000
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
PROMPT = "import os\nimport sys\n\n\ndef main(args):\n    "


def samples(verifier: Verifier, count: int) -> list[tuple[int, int]]:
    """The first two tokens after one prompt at temperature 1, each request with a seed of its own."""
    prompt = AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids
    drawn: list[tuple[int, int]] = []
    for start in range(0, count, BATCH):
        params = [SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=start + i) for i in range(BATCH)]
        drawn += [(a.tokens[0], a.tokens[1]) for a in verifier.client.generate([prompt] * BATCH, params)]
    return drawn


def distribution(plain: Verifier, after: list[int]) -> dict[int, float]:
    """The target's next-token probabilities."""
    prompt = AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids + after
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    (answer,) = plain.client.generate([prompt], params)
    top = answer.outputs[0].new_logprobs
    pairs = zip(top.logprob_token_ids[0].tolist(), top.logprobs[0].tolist(), strict=True)
    return {token: math.exp(logprob) for token, logprob in pairs}


def p_values(plain: Verifier, drawn: list[tuple[int, int]]) -> dict[str, float]:
    """One test of the first token, one of the second where the first is the commonest."""
    first = [a for a, _ in drawn]
    common = max(set(first), key=first.count)
    return {
        "first": chi_square(first, distribution(plain, [])),
        "second": chi_square([b for a, b in drawn if a == common], distribution(plain, [common])),
    }


def test_plain_decoding_draws_from_the_targets_distribution(plain: Verifier, said: dict[str, Future[Said]]) -> None:
    found = p_values(plain, said["off"].result().draws)
    print(found)
    assert min(found.values()) * len(found) > SIGNIFICANT, found


@pytest.mark.campaign
def test_many_more_draws_are_from_the_targets_distribution(plain: Verifier) -> None:
    found = p_values(plain, samples(plain, MANY_SAMPLES))
    print(found)
    assert min(found.values()) * len(found) > SIGNIFICANT, found


@pytest.fixture(scope="module")
def unseeded(plain: Verifier) -> Exact:
    return Exact(plain, AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids, UNSEEDED, 3, FEW_SAMPLES)


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_requests_without_a_seed_draw_from_the_targets_distribution(
    engines: dict[str, Verifier], said: dict[str, Future[Said]], unseeded: Exact, mode: str
) -> None:
    """The noise is new each time.  The campaign has more draws, and other kinds of requests."""
    said[mode].result()
    before, prompt = accepted(engines[mode]), AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids
    found = unseeded.p_value(draw(engines[mode], prompt, [UNSEEDED] * FEW_SAMPLES))
    print(found)
    assert accepted(engines[mode]) - before > FEW_SAMPLES / 4, "it really speculated"
    assert found > SIGNIFICANT / 1000


def test_a_head_that_drafts_in_one_pass_changes_no_text(
    plain: Verifier, expected: dict[str, list[Answer]], unseeded: Exact, tmp_path: Path
) -> None:
    """It knows how frequent tokens are, and no more: most drafts are cut somewhere."""
    common = torch.bincount(torch.tensor([token for answer in expected["T = 1.0"] for token in answer.tokens]), minlength=2048)
    head = write_unigram_head(tmp_path / "head", (common + 0.01) / (common + 0.01).sum())
    paths = ResolvedModels(str(TARGET_DIR), head, "dflash", "demo")
    drafter, verifier = Drafter(tmp_path, paths), start(tmp_path, "sync", paths)
    try:
        verifier.set_drafters(drafter.ref)
        for temperature in (0.0, 1.0):
            found = texts(verifier, python_prompts(FEW_PROMPTS), RequestOptions(learn=False), temperature=temperature)
            assert_same(plain, f"T = {temperature}", expected[f"T = {temperature}"][:FEW_PROMPTS], found)
        prompt = AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids
        assert unseeded.p_value(draw(verifier, prompt, [UNSEEDED] * FEW_SAMPLES)) > SIGNIFICANT / 1000
        counted = verifier.client.fresh_stats().drafters["drafter-0"]
        print(f"{counted.accepted_tokens} of {counted.draft_tokens} draft tokens accepted")
        assert counted.accepted_tokens > FEW_PROMPTS
    finally:
        verifier.close()
        drafter.close()


def first_tokens(probabilities: dict[int, float], noise: float) -> list[int]:
    """What `samples` draws first, computed from the probabilities with `noise` times the noise."""
    tokens, position = torch.tensor(list(probabilities)), len(AutoTokenizer.from_pretrained(str(TARGET_DIR))(PROMPT).input_ids)
    logits, ones = torch.tensor(list(probabilities.values())).log().expand(SAMPLES, -1), torch.ones(SAMPLES)
    chosen = choose(logits, torch.arange(SAMPLES), torch.full((SAMPLES,), position), ones, noise * ones, tokens)
    drawn: list[int] = tokens[chosen.columns].tolist()
    return drawn


def test_the_same_test_finds_too_little_noise(plain: Verifier, said: dict[str, Future[Said]]) -> None:
    probabilities = distribution(plain, [])
    alike = sum(a == b for (a, _), b in zip(said["off"].result().draws, first_tokens(probabilities, 1.0), strict=True))
    assert alike > 0.99 * SAMPLES, "but for near ties"
    assert chi_square(first_tokens(probabilities, 0.9), probabilities) < SIGNIFICANT / 1000


def test_the_chi_square_tail_is_the_tabulated_one() -> None:
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert chi_square([1, 2] * 500, {1: 0.5, 2: 0.5}) == pytest.approx(1.0)
