"""A step that verifies drafts says what plain decoding would have said, token by token, with all of vLLM's processors.

Plain decoding here is one request and one row at a time, where the processors are applied by vLLM's own sampler.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from msgspec.structs import replace
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors, MoveDirectionality
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from backend.engine.worker.runner import PlainUndraftedSteps, RemoteDrafting
from backend.engine.worker.sampling import SharedNoise
from backend.speculation.proposals import Proposal
from backend.wire.engine import INDEPENDENT, LOGPROBS_MODE, NOISE_SEED
from tests.support.no_repeat import NoRepeat
from tests.support.reads import ON_A_CPU, nothing_read
from tests.support.true_noise import true_gumbel

VOCAB, DEEPEST = 24, 4
THINK, THOUGHTS = 22, 20
"""The token that begins thinking, and how many tokens are compared.  The next token ends thinking."""
CPU = torch.device("cpu")


@dataclass
class Request:
    """One request of a batch, and the target's logits behind each of its draft tokens, `[depth, vocabulary]`."""

    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits: torch.Tensor
    draft: list[int] = field(default_factory=list)

    def after(self, depth: int) -> Request:
        """As it would be had the first `depth` draft tokens been emitted, and without a draft."""
        return Request(self.params, self.prompt, [*self.output, *self.draft[:depth]], self.logits[depth:])


class Runner(SharedNoise):
    """What the mixin finds in vLLM's runner."""

    def __init__(self, requests: list[Request], logprobs: int | None, mode: str) -> None:
        config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=16))
        kinds = MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor, NoRepeat
        processors = LogitsProcessors([kind(config, CPU, False) for kind in kinds])
        self.requests: dict[str, CachedRequestState] = {}
        self.sampler = Sampler(mode)
        self.input_batch = InputBatch(16, 64, 64, CPU, VOCAB, [], [], processors, True, DEEPEST)
        for i, each in enumerate(requests):
            state = self.requests[f"r{i}"] = CachedRequestState(f"r{i}", each.prompt, [], each.params, None, (), 0, each.output)
            self.input_batch.add_request(state)
            self.input_batch.update_req_spec_token_ids(state, {f"r{i}": each.draft})
        self.input_batch.refresh_metadata()
        self.input_batch.sampling_metadata.max_num_logprobs = logprobs


def sample(
    requests: list[Request],
    logprobs: int | None = None,
    mode: str = "raw_logprobs",
    holder: Any = None,
    by_token: dict[int, list[int]] | None = None,
) -> SamplerOutput:
    """One step; `holder` has the thinking budgets, `by_token` the `logprob_token_ids` of each request."""
    logits = torch.cat([request.logits[: len(request.draft) + 1] for request in requests])
    drafted = [len(request.draft) for request in requests]
    tokens = torch.tensor([token for request in requests for token in request.draft], dtype=torch.int32)
    before = [list(request.output) for request in requests]
    runner = Runner(requests, logprobs, mode)
    runner.input_batch.sampling_metadata.thinking_budget_state_holder = holder
    runner.input_batch.sampling_metadata.logprob_token_ids = by_token
    output = runner._sample(logits.clone(), SimpleNamespace(num_draft_tokens=drafted, draft_token_ids=tokens))
    assert [request.output for request in requests] == before, "outputs are as they were"
    return output


SEEDS = (0, 3, 2**64 - 1, 2**63 + 5)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.4},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]},
    "logit_bias": {"logit_bias": {3: 2.5, 9: -4.0, 17: 1.5}},
    "min_p": {"min_p": 0.3},
    "top": {"top_k": 5, "top_p": 0.8},
    "custom": {"extra_args": {"no_repeat": True}},
    "bad_words": {},
    "allowed": {},
}
ALL = [name for name in FEATURES if name != "plain"]


def make(dice: random.Random, names: list[str], generator: torch.Generator) -> Request:
    """A request with these features; about two thirds of its draft tokens are right."""
    changes: dict[str, Any] = {}
    for name in names:
        changes |= FEATURES[name]
    changes["extra_args"] = {**changes.get("extra_args", {}), NOISE_SEED: dice.choice(SEEDS)}
    params = SamplingParams(temperature=dice.choice([0, 0.7, 1.0, 1.5]), max_tokens=50, **changes)
    tokens = [dice.randrange(VOCAB) for _ in range(dice.randrange(2, 9))]
    cut = dice.randrange(1, len(tokens))
    request = Request(params, tokens[:cut], tokens[cut:], 2 * torch.randn(DEEPEST + 1, VOCAB, generator=generator))
    if "bad_words" in names:
        params._bad_words_token_ids = [[dice.randrange(VOCAB)], *([a, b] for a in range(VOCAB) for b in range(0, VOCAB, 3))]
    if "allowed" in names:
        params.allowed_token_ids = dice.sample(range(VOCAB), 6)
    for depth in range(dice.choice([0, 1, 2, DEEPEST])):
        right = int(sample([request.after(depth)]).sampled_token_ids[0, 0])
        request.draft.append(right if dice.random() < 0.7 else dice.randrange(VOCAB))
    return request


def said(request: Request) -> list[int]:
    """What plain decoding says while it agrees with the draft, and one token more."""
    tokens: list[int] = []
    for depth in range(len(request.draft) + 1):
        tokens.append(int(sample([request.after(depth)]).sampled_token_ids[0, 0]))
        if depth == len(request.draft) or tokens[-1] != request.draft[depth]:
            break
    return tokens


def batch(seed: int, names: list[str]) -> list[Request]:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [make(dice, [name for name in names if dice.random() < 0.7], generator) for _ in range(dice.randrange(1, 5))]


@pytest.mark.parametrize(
    "names", [*([name] for name in FEATURES), ALL], ids=lambda names: names[0] if len(names) == 1 else "all"
)
def test_drafts_change_no_token(names: list[str]) -> None:
    kept = 0
    for seed in range(15):
        requests = batch(seed, names)
        for row, request in zip(sample(requests).sampled_token_ids.tolist(), requests, strict=True):
            expected = said(request)
            kept += len(expected) - 1
            assert row == expected + [-1] * (len(row) - len(expected))
    assert kept > 10, "drafts were accepted"


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_log_probabilities_are_those_of_plain_decoding(mode: str, wanted: int) -> None:
    for seed in range(4):
        requests = batch(seed, ["penalties", "min_tokens", "top", "custom"])
        output = sample(requests, wanted, mode)
        found, width = output.logprobs_tensors, output.sampled_token_ids.shape[1]
        assert found is not None
        for i, request in enumerate(requests):
            for depth in range(len(said(request))):
                plain = sample([request.after(depth)], wanted, mode).logprobs_tensors
                assert plain is not None
                for mine, its in zip(found[:3], plain[:3], strict=True):
                    if its is not None and its.numel():
                        torch.testing.assert_close(mine[i * width + depth], its[0], rtol=1e-5, atol=1e-5)


def test_seeds_and_positions_decide_and_greedy_requests_have_no_noise() -> None:
    logits = torch.zeros(DEEPEST + 1, VOCAB)
    logits[:, 7] = 0.1

    def one(seed: int, length: int, temperature: float) -> int:
        params = SamplingParams(temperature=temperature, extra_args={NOISE_SEED: seed})
        return int(sample([Request(params, [1] * length, [], logits)]).sampled_token_ids[0, 0])

    assert {one(seed, 3, 0.0) for seed in range(20)} == {7}
    assert len({one(seed, 3, 1.0) for seed in range(20)}) > 5
    assert len({one(1, length, 1.0) for length in range(1, 20)}) > 5
    assert one(2**64 - 1, 3, 1.0) == one(2**64 - 1, 3, 1.0)


@pytest.mark.parametrize("accepted", range(DEEPEST))
def test_the_last_token_of_a_sampled_draft_has_noise_of_its_own(accepted: int) -> None:
    """A drafter ranks outcomes by the same noise (`test_independent.py`)."""
    for seed in range(8):
        logits = torch.zeros(DEEPEST + 1, VOCAB)
        logits[range(accepted), range(accepted)] = 50.0
        params = SamplingParams(temperature=1.0, extra_args={NOISE_SEED: seed, INDEPENDENT: True})
        draft = list(range(accepted))
        row = sample([Request(params, [1, 2, 3], [], logits, draft=draft)]).sampled_token_ids[0].tolist()
        noise = [true_gumbel(seed, 3 + accepted, token, accepted and accepted + 1) for token in range(VOCAB)]
        assert row == [*draft, noise.index(max(noise))]


def test_a_request_in_a_mixed_batch_is_as_alone() -> None:
    """It emits the same by its own rule, with the log probabilities and the alternatives that it asks for."""
    mixed = 0
    for seed in range(20):
        requests, default = batch(seed, ["penalties", "top"]), ("raw", "processed")[seed % 2]
        names = [(7,), (7, 2, 9, 4, 11)][seed // 2 % 2]
        by_token = {i: list(names) for i in range(seed % 3, len(requests), 2)}
        wishes = [[None, "raw", "processed"][(seed + i) % 3] for i in range(len(requests))]
        for i, (request, wish) in enumerate(zip(requests, wishes, strict=True)):
            own: dict[str, Any] = {LOGPROBS_MODE: wish} if wish else {}
            own |= {INDEPENDENT: True} if request.params.temperature and (seed + i) % 2 else {}
            request.params.extra_args |= own
        together = sample(requests, 3, f"{default}_logprobs", by_token=by_token)
        found, width = together.logprobs_tensors, together.sampled_token_ids.shape[1]
        for i, (request, row, wish) in enumerate(zip(requests, together.sampled_token_ids.tolist(), wishes, strict=True)):
            request.params.extra_args.pop(LOGPROBS_MODE, None)
            named = {0: by_token[i]} if i in by_token else None
            alone = sample([request], None if named else 3, f"{wish or default}_logprobs", by_token=named)
            assert found is not None
            assert alone.logprobs_tensors is not None
            said = [token for token in alone.sampled_token_ids[0].tolist() if token >= 0]
            assert row == said + [-1] * (width - len(said))
            columns = 1 + (len(names) if named else 3)
            for mine, its in zip(found[:2], alone.logprobs_tensors[:2], strict=True):
                torch.testing.assert_close(mine[i * width :][: len(said), :columns], its[: len(said), :columns])
            assert torch.equal(found[2][i * width :][: len(said)], alone.logprobs_tensors[2][: len(said)]), "ranks"
        rules = {bool(each.params.extra_args.get(INDEPENDENT)) for each in requests if each.draft}
        mixed += len(rules) == 2
    assert mixed > 3


def think(seed: int, end: list[int], longest_draft: int, plain: list[list[int]] | None = None) -> list[list[int]]:
    """Outputs of a batch of which some requests have a thinking budget; drafts are mostly what `plain` says."""
    dice = random.Random(seed)
    budgets = [dice.choice([None, 0, 2, 5, 8]) for _ in range(4)]
    thought: Any = SimpleNamespace(reasoning_start_token_ids=[THINK], reasoning_end_token_ids=end)
    holder = ThinkingBudgetStateHolder(thought, 8, longest_draft, CPU, False)
    params = [SamplingParams(temperature=0, thinking_token_budget=budget) for budget in budgets]
    requests = [Request(each, [1, THINK], [], torch.empty(0)) for each in params]
    added = [(i, each.params, each.prompt, each.output) for i, each in enumerate(requests)]
    holder.sync_batch(BatchUpdate(len(requests), [], added, []))
    places = list(range(len(requests)))
    while min(len(each.output) for each in requests) < THOUGHTS:
        if plain:
            # As vLLM's batch does: places change.
            one, other = dice.sample(range(len(places)), 2)
            places[one], places[other] = places[other], places[one]
            holder.sync_batch(BatchUpdate(len(requests), [], [], [(one, other, MoveDirectionality.SWAP)]))
        for i, each in enumerate(requests):
            at = len(each.output)
            right = plain[i][at : at + dice.choice([0, 1, longest_draft])] if plain else []
            each.draft = [token if dice.random() < 0.8 else dice.randrange(VOCAB) for token in right]
            generators = [torch.Generator().manual_seed(97 * i + at + depth) for depth in range(len(each.draft) + 1)]
            each.logits = torch.stack([torch.randn(VOCAB, generator=generator) for generator in generators])
            each.logits[:, THINK:] -= 50
        present = [requests[i] for i in places]
        for each, row in zip(present, sample(present, holder=holder).sampled_token_ids.tolist(), strict=True):
            each.output.extend(token for token in row if token >= 0)
    return [each.output[:THOUGHTS] for each in requests]


@pytest.mark.parametrize("end", [[THINK + 1], [THINK + 1, 5, 7]], ids=["one", "three"])
def test_thinking_ends_where_its_budget_says(end: list[int]) -> None:
    ended = 0
    for seed in range(6):
        plain = think(seed, end, 0)
        ended += sum(end[0] in output for output in plain)
        assert think(seed, end, 4) == plain, "an engine that may draft, and does not"
        assert think(seed, end, 4, plain) == plain
    assert ended > 5


PINNED = {
    "async_tensor_h2d": "copied from pinned memory, while the GPU works",
    "make_tensor_with_pad": "likewise: outputs, for penalties",
    "Sampler.gather_specific_token_logprobs": "likewise: tokens whose log probabilities are asked for",
}


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "no drafts"])
@pytest.mark.parametrize("rules", [["greedy"], ["seeded"], ["unseeded"], ["greedy", "seeded", "unseeded"]], ids=" ".join)
def test_sampling_waits_for_no_result(monkeypatch: pytest.MonkeyPatch, rules: list[str], drafts: bool) -> None:
    dice, generator, sampling = random.Random(1), torch.Generator().manual_seed(1), Runner._sample
    requests, proposals = [make(dice, ALL if i % 2 else [], generator) for i in range(9)], {}
    for i, request in enumerate(requests):
        rule = rules[i % len(rules)]
        request.params = replace(request.params, temperature=0.0 if rule == "greedy" else 0.8)
        request.params.extra_args[INDEPENDENT] = rule == "unseeded"
        request.draft = request.draft if drafts else []
        if i < 5 and (own := request.draft):
            ids = np.array([[token, (token + 1) % VOCAB] for token in own], np.int32)
            proposals[f"r{i}"] = Proposal(ids, np.full(ids.shape, 0.5, np.float32))
    monkeypatch.setattr(Runner, "proposals", proposals)
    expected = sample(requests, 3, by_token={1: [7, 2]})

    def guarded(runner: Runner, *given: Any) -> SamplerOutput:
        with nothing_read(ON_A_CPU | PINNED):
            return sampling(runner, *given)

    monkeypatch.setattr(Runner, "_sample", guarded)
    assert torch.equal(sample(requests, 3, by_token={1: [7, 2]}).sampled_token_ids, expected.sampled_token_ids)


@pytest.mark.parametrize(("drafts", "verified"), [([0, 0], False), ([], False), ([0, 2], True), ([4], True)])
def test_the_rejection_sampler_sees_only_steps_with_drafts(drafts: list[int], verified: bool) -> None:
    class Sampling:
        def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
            return logits, spec_decode_metadata

    class Mixed(PlainUndraftedSteps, Sampling):
        pass

    metadata = SimpleNamespace(num_draft_tokens=drafts)
    assert Mixed()._sample("logits", metadata) == ("logits", metadata if verified else None)
    assert Mixed()._sample("logits", None) == ("logits", None)


def test_memory_is_measured_for_the_rows_of_all_draft_tokens() -> None:
    class Sampling:
        num_spec_tokens, max_num_tokens = 8, 30

        def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> int:
            return len(hidden_states)

    class Drafting(RemoteDrafting, Sampling):  # type: ignore[misc]
        pass

    runner: Any = Drafting()
    assert [runner._dummy_sampler_run(torch.zeros(requests, 2)) for requests in (2, 3, 4)] == [18, 27, 30]
