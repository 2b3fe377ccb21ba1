"""Speculation changes no token: the same seed gives the same text in every mode, and plain decoding draws from p."""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams

from backend.config import REMOTE_MODES
from backend.engine.client import Answer
from backend.fleet import DraftCounters
from backend.models.demo import DRAFT_MODEL_DIR, TARGET_DIR
from backend.models.resolve import ResolvedModels
from backend.noise import choose
from backend.wire.engine import Account, RequestOptions
from tests.lossless.cases import (
    FEW_PROMPTS,
    FEW_TOKENS,
    MANY_PROMPTS,
    PROMPTS,
    TOKENS,
    VARIANTS,
    all_texts,
    as_prompts,
    assert_same,
    furthest_of,
    logprobs,
    python_prompts,
    request,
    start,
    texts,
)
from tests.support.drafter_heads import write_unigram_head
from tests.support.draws import Exact, accepted, draw
from tests.support.other_vocabulary import write_permuted
from tests.support.processes import Drafter, Verifier, together
from tests.support.statistics import chi_square, chi_square_tail

pytestmark = pytest.mark.engine

FEWER = ("T = 0.0", "T = 0.7")
"""Asked for with a few prompts only; the campaign asks for them with all."""
SAMPLES, MANY_SAMPLES = 2_500, 60_000
MANY_LOGPROBS = 1_000
SIGNIFICANT = 0.01
"""Too little noise is a thousand times as significant with as many samples.  The draws are fixed by the requests' seeds: the
outcome is the same every time."""
MODES = ("off", "sync", "ahead", "auto", "native")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, drafter: Drafter) -> Iterator[dict[str, Verifier]]:
    """A verifier of each mode, two loading at a time; one drafter answers those that draft remotely."""
    directory = tmp_path_factory.mktemp("l")
    with together(*(functools.partial(start, directory, mode) for mode in MODES)) as started:
        by_mode = dict(zip(MODES, started, strict=True))
        for mode in REMOTE_MODES:
            by_mode[mode].set_drafters(drafter.ref)
        yield by_mode


@dataclass
class ModeAnswers:
    """What one engine answered."""

    texts: dict[str, list[Answer]] = field(default_factory=dict)
    draws: list[list[int]] = field(default_factory=list)


def ask(verifier: Verifier, mode: str) -> ModeAnswers:
    """Everything a mode is asked: texts, and draws of plain decoding."""
    if mode == "native":
        return ModeAnswers({"T = 0.0": texts(verifier, python_prompts(FEW_PROMPTS), temperature=0.0)})
    return ModeAnswers(all_texts(verifier), samples(verifier, SAMPLES) if mode == "off" else [])


@pytest.fixture(scope="module")
def answers_by_mode(engines: dict[str, Verifier]) -> dict[str, ModeAnswers]:
    """What each mode says; two engines work at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(engines, pool.map(ask, engines.values(), engines), strict=True))


@pytest.fixture(scope="module")
def plain(engines: dict[str, Verifier], answers_by_mode: dict[str, ModeAnswers]) -> Verifier:
    """Plain decoding, when all have answered: one thread at a time talks to an engine."""
    return engines["off"]


@pytest.fixture(scope="module")
def expected(answers_by_mode: dict[str, ModeAnswers]) -> dict[str, list[Answer]]:
    """What plain decoding says."""
    found = answers_by_mode["off"].texts
    tokens = {name: [answer.tokens for answer in answers] for name, answers in found.items()}
    assert {len(text) for name in ("T = 1.0", *FEWER) for text in tokens[name]} == {TOKENS}
    assert tokens["T = 1.0"][:FEW_PROMPTS] != tokens["T = 0.7"] != tokens["T = 0.0"]
    return found


@pytest.mark.parametrize("mode", MODES[1:])
def test_every_mode_says_what_plain_decoding_says(
    engines: dict[str, Verifier],
    plain: Verifier,
    answers_by_mode: dict[str, ModeAnswers],
    expected: dict[str, list[Answer]],
    mode: str,
) -> None:
    for name, found in answers_by_mode[mode].texts.items():
        assert_same(plain, name, expected[name], found)
    assert accepted(engines[mode])[1] > (FEW_PROMPTS if mode == "native" else PROMPTS * TOKENS / 4), "it really speculated"


@pytest.mark.campaign
@pytest.mark.parametrize("name", FEWER)
def test_every_mode_says_it_to_all_prompts(engines: dict[str, Verifier], plain: Verifier, name: str) -> None:
    fields = VARIANTS[name]
    prompts = python_prompts(MANY_PROMPTS)
    expected = texts(plain, prompts, **fields)
    for mode in sorted(engines.keys() - {"off"} if name == "T = 0.0" else REMOTE_MODES):
        assert_same(plain, name, expected, texts(engines[mode], prompts, **fields))


@pytest.fixture(scope="module")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafter]:
    """A small language model that drafts from tokens alone."""
    with Drafter(tmp_path_factory.mktemp("m"), draft_model=str(DRAFT_MODEL_DIR)) as drafter:
        yield drafter


def drafted_by(draft_model: Drafter, verifier: Verifier, plain: Verifier, expected: dict[str, list[Answer]]) -> DraftCounters:
    """Asks for what plain decoding has said greedily and at temperature 1; what this draft model brought."""
    verifier.set_drafters(draft_model.ref)
    before = verifier.client.fresh_stats().drafters.get("drafter-0", DraftCounters())
    params = [request(1000 + i, temperature=temperature) for temperature in (0.0, 1.0) for i in range(FEW_PROMPTS)]
    # Otherwise the earlier answers to these prompts would draft.
    found = verifier.client.generate(python_prompts(FEW_PROMPTS) * 2, params, options=RequestOptions(learn=False))
    assert_same(plain, "T = 0.0", expected["T = 0.0"], found[:FEW_PROMPTS])
    assert_same(plain, "T = 1.0", expected["T = 1.0"][:FEW_PROMPTS], found[FEW_PROMPTS:])
    brought = verifier.client.fresh_stats().drafters["drafter-0"]
    for name in ("draft_tokens", "accepted_tokens", "bytes_sent"):
        setattr(brought, name, getattr(brought, name) - getattr(before, name))
    print(f"{brought.accepted_tokens} of {brought.draft_tokens} draft tokens accepted")
    return brought


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_with_a_draft_model_every_mode_says_the_same(
    engines: dict[str, Verifier],
    plain: Verifier,
    expected: dict[str, list[Answer]],
    draft_model: Drafter,
    drafter: Drafter,
    mode: str,
) -> None:
    brought = drafted_by(draft_model, engines[mode], plain, expected)
    engines[mode].set_drafters(drafter.ref)
    assert brought.accepted_tokens > 0
    assert brought.bytes_sent < 2 * FEW_PROMPTS * (TOKENS + 40) * 100, "tokens alone, where a feature has 1,024 bytes"


@pytest.mark.parametrize(("renamed", "least"), [(None, 0.98), (range(1900, 2048), 0.8)])
def test_a_draft_model_that_is_the_target_is_always_right(
    renamed: range | None,
    least: float,
    engines: dict[str, Verifier],
    plain: Verifier,
    expected: dict[str, list[Answer]],
    drafter: Drafter,
    tmp_path: Path,
) -> None:
    """With other ids, too; but if some of its tokens have other names, then it does not know them in the text."""
    model = TARGET_DIR if renamed is None else write_permuted(TARGET_DIR, tmp_path / "permuted", renamed)
    with Drafter(tmp_path, draft_model=str(model)) as itself:
        brought = drafted_by(itself, engines["sync"], plain, expected)
        engines["sync"].set_drafters(drafter.ref)
    # But for near ties: the noise is the same too.
    assert brought.accepted_tokens > least * brought.draft_tokens > FEW_PROMPTS


EACH = PROMPTS // 9
"""Requests of each of the options below."""


def all_options(text: list[int]) -> list[RequestOptions]:
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
    engines: dict[str, Verifier], plain: Verifier, expected: dict[str, list[Answer]], mode: str
) -> None:
    client, truth, count = engines[mode].client, expected["T = 1.0"], len(all_options([]))
    ids = []
    for i, prompt in enumerate(python_prompts(EACH * count)):
        options = all_options(truth[i].tokens)[i % count]
        ids.append(client.add(prompt, request(1000 + i, temperature=1.0), options=options))
    client.finish_all()
    found = [client.answers.pop(each) for each in ids]
    assert_same(plain, "T = 1.0", truth[: EACH * count], found)
    accounts = [each.account or Account("") for each in found]
    brought = [each.tokens / each.verifications for each in accounts]
    by_option = [sum(brought[i::count]) / EACH for i in range(count)]
    assert by_option[0] == by_option[3] == 1.0, "no drafts"
    assert 1.0 < by_option[4] <= 2.0, "one token each"
    true = [tally for each in accounts[5::count] for tally in each.tallies if tally.source == "prediction"]
    assert sum(tally.accepted for tally in true) == sum(tally.drafted for tally in true) > 0, "of it, all is accepted"
    shared = [tally for each in accounts[8::count] for tally in each.tallies if tally.source == "shared"]
    assert sum(tally.accepted for tally in shared) > EACH * TOKENS / 8, "the first answers to these prompts draft"


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_logprobs_are_the_same_with_and_without_speculation(
    answers_by_mode: dict[str, ModeAnswers], expected: dict[str, list[Answer]], mode: str
) -> None:
    for mine, theirs in zip(expected["logprobs"], answers_by_mode[mode].texts["logprobs"], strict=True):
        assert mine.tokens == theirs.tokens
        pairs = list(zip(logprobs(mine), logprobs(theirs), strict=True))
        assert len(pairs) == FEW_TOKENS
        assert max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)) < 1e-4


@pytest.mark.campaign
def test_logprobs_of_a_thousand_sampled_tokens(engines: dict[str, Verifier], plain: Verifier) -> None:
    """Native draws other tokens: what it says of them is compared with what plain decoding's engine says of the same tokens."""
    prompts = python_prompts(MANY_LOGPROBS // TOKENS + 1)
    expected = texts(plain, prompts, temperature=1.0, logprobs=0)
    furthest = {"off, as a prompt": furthest_of(expected, as_prompts(plain, prompts, expected))}
    for mode in sorted(REMOTE_MODES):
        furthest[mode] = furthest_of(texts(engines[mode], prompts, temperature=1.0, logprobs=0), expected)
    native = texts(engines["native"], prompts, temperature=1.0, logprobs=0)
    furthest["native"] = furthest_of(native, as_prompts(plain, prompts, native))
    print(f"logprobs of {len(prompts) * TOKENS} tokens differ by at most:", {k: f"{v:.2g}" for k, v in furthest.items()})
    assert max(furthest.values()) < 1e-4


# -- plain decoding draws from p ---------------------------------------------------------------------------------------

FEW_SAMPLES = 1_000
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True)
OPENING = "import os\nimport sys\n\n\ndef main(args):\n    "


@functools.cache
def opening() -> list[int]:
    tokens: list[int] = AutoTokenizer.from_pretrained(str(TARGET_DIR))(OPENING).input_ids
    return tokens


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=2, ignore_eos=True, seed=seed)


def samples(verifier: Verifier, count: int) -> list[list[int]]:
    """The first two tokens after one prompt at temperature 1, each request with a seed of its own."""
    return draw(verifier, opening(), [seeded(i) for i in range(count)])


@pytest.fixture(scope="module")
def exact(plain: Verifier) -> Exact:
    return Exact(plain, opening(), seeded(0), 2, SAMPLES)


def test_plain_decoding_draws_from_the_targets_distribution(exact: Exact, answers_by_mode: dict[str, ModeAnswers]) -> None:
    assert exact.p_value(answers_by_mode["off"].draws) > SIGNIFICANT


@pytest.mark.campaign
def test_many_more_draws_are_from_the_targets_distribution(plain: Verifier) -> None:
    assert Exact(plain, opening(), seeded(0), 2, MANY_SAMPLES).p_value(samples(plain, MANY_SAMPLES)) > SIGNIFICANT


@pytest.fixture(scope="module")
def unseeded(plain: Verifier) -> Exact:
    return Exact(plain, opening(), UNSEEDED, 3, FEW_SAMPLES)


@pytest.mark.parametrize("mode", sorted(REMOTE_MODES))
def test_requests_without_a_seed_draw_from_the_targets_distribution(
    engines: dict[str, Verifier], unseeded: Exact, mode: str
) -> None:
    """The noise is new each time.  The campaign has more draws, and other kinds of requests."""
    _, before = accepted(engines[mode])
    found = unseeded.p_value(draw(engines[mode], opening(), [UNSEEDED] * FEW_SAMPLES))
    print(found)
    assert accepted(engines[mode])[1] - before > FEW_SAMPLES / 4, "it really speculated"
    assert found > SIGNIFICANT / 1000


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_head_that_drafts_in_one_pass_changes_no_text(
    plain: Verifier, expected: dict[str, list[Answer]], unseeded: Exact, tmp_path: Path, kind: str
) -> None:
    """It knows how frequent tokens are, and no more: most drafts are cut somewhere."""
    common = torch.bincount(torch.tensor([token for answer in expected["T = 1.0"] for token in answer.tokens]), minlength=2048)
    head = write_unigram_head(tmp_path / "head", (common + 0.01) / (common + 0.01).sum(), kind)
    paths = ResolvedModels(str(TARGET_DIR), head, "dflash", "demo")
    with Drafter(tmp_path, paths) as drafter, start(tmp_path, "sync", paths) as verifier:
        verifier.set_drafters(drafter.ref)
        brought = drafted_by(drafter, verifier, plain, expected)
        assert unseeded.p_value(draw(verifier, opening(), [UNSEEDED] * FEW_SAMPLES)) > SIGNIFICANT / 1000
        assert brought.accepted_tokens > FEW_PROMPTS


def first_tokens(probabilities: dict[int, float], noise: float) -> list[int]:
    """What `samples` draws first, computed from the probabilities with `noise` times the noise."""
    tokens, position = torch.tensor(list(probabilities)), len(opening())
    logits, ones = torch.tensor(list(probabilities.values())).log().expand(SAMPLES, -1), torch.ones(SAMPLES)
    chosen = choose(logits, torch.arange(SAMPLES), torch.full((SAMPLES,), position), ones, noise * ones, tokens)
    drawn: list[int] = tokens[chosen.columns].tolist()
    return drawn


def test_the_same_test_finds_too_little_noise(exact: Exact, answers_by_mode: dict[str, ModeAnswers]) -> None:
    probabilities = exact.next[()]
    alike = sum(a == b for (a, *_), b in zip(answers_by_mode["off"].draws, first_tokens(probabilities, 1.0), strict=True))
    assert alike > 0.99 * SAMPLES, "but for near ties"
    assert chi_square(first_tokens(probabilities, 0.9), probabilities) < SIGNIFICANT / 1000


def test_the_chi_square_tail_is_the_tabulated_one() -> None:
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-4)
    assert chi_square([1, 2] * 500, {1: 0.5, 2: 0.5}) == pytest.approx(1.0)
