"""The real engine loop, drafting scheduler, runner mixin and feature shipper, around a table in place of a model.  Tests only.

vLLM's own scheduler decides what runs.  The model is replaced by texts known beforehand.  So the right result of every step is
known, rejections happen, and drafts made from wrong features or at a wrong length are detected.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import vllm  # noqa: F401  (must be the first of vLLM's modules)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from backend.config import Settings
from backend.drafter.eagle import EagleProposer
from backend.engine.build import build_config
from backend.engine.counting import Counters
from backend.engine.draft_links import DraftLinks
from backend.engine.features import FeatureShipper
from backend.engine.loop import EngineLoop
from backend.engine.observers import RequestState
from backend.engine.scheduler import DraftingScheduler
from backend.engine.worker.runner import RemoteDrafting
from backend.fleet import LOOKUP, VerifierStats
from backend.lab.bench.load import APART
from backend.speculation.chances import Rule
from tests.support.drafter_sessions import Session
from tests.support.processes import demo_models
from tests.support.rows import connected
from tests.unit.backend.drafter.simulated_link import SimulatedDealer, World

BLOCK = 32
FIXED_S, TOKEN_S = 5e-3, 1e-4
"""Seconds of a step: the fixed part, and the part per token."""
AGREEMENT = 0.8
K = 4
CUT = 8
"""Tokens at the end of a text that are not asked for: the last step may emit them, too."""


class Text(NamedTuple):
    """A text of the target: its tokens, the first `prompt` of which are the prompt, and features `[len(tokens), hidden]`."""

    tokens: list[int]
    features: torch.Tensor
    prompt: int


def write_text(proposer: EagleProposer, seed: int, prompt: int, length: int) -> Text:
    """Makes a text in which a share `AGREEMENT` of tokens is what the head drafts from the true context.

    So a drafter with a wrong context shows as lost acceptance.
    """
    dice, vocab = random.Random(seed), proposer.vocab_size
    session = Session(proposer, seed, [dice.randrange(vocab) for _ in range(prompt)])
    while len(session.tokens) < length:
        (drafted,) = session.draft(1).tokens
        session.commit([drafted if dice.random() < AGREEMENT else dice.randrange(vocab)])
    proposer.close(seed)
    return Text(session.tokens, torch.stack([session.feature(position) for position in range(length)]), prompt)


@functools.cache
def _vllm(mode: str, lookup: bool) -> tuple[Any, StructuredOutputManager]:
    options = {"ahead_outcomes": 4, "draft_deadline_s": 0.1}
    settings = Settings.model_validate(
        {
            "mode": mode,
            "num_speculative_tokens": K,
            "verifier": {
                "max_num_seqs": 8,
                "engine_args": {"max_num_batched_tokens": 96, "additional_config": {"outrider": options}},
                "lookup": lookup,
            },
        }
    )
    config = build_config(settings, demo_models())
    return config, StructuredOutputManager(config)


class _Executes:
    """The part of vLLM's runner that the mixin calls."""

    execute_model_state: Any = None
    input_batch: Any

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any) -> None:
        """Does nothing: `SimulatedCore` has set the state already."""


class _Runner(RemoteDrafting, _Executes):
    def __init__(self, requests: dict[str, Request]) -> None:
        self.requests = requests
        """The scheduler's, in place of vLLM's state of each request."""
        self.cudagraph_dispatcher = SimpleNamespace()


class SimulatedCore:
    """Replaces vLLM's `EngineCore`."""

    def __init__(self, world: World, mode: str, blocks: int, lookup: bool) -> None:
        config, structured = _vllm(mode, lookup)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = DraftingScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=structured,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        self.batch_queue = None
        init_none_hash(hash)
        self._hasher = get_request_block_hasher(BLOCK, lambda value: hash(value).to_bytes(8, "big", signed=True))
        self._world = world
        self.texts: dict[str, Text] = {}
        self.decided = 0
        """Number of tokens that the target has emitted, before truncation at a stop."""
        self.runner = _Runner(self.scheduler.requests)
        self.runner.set_up_drafting(FeatureShipper(lambda head: None), (), True)

    def add(self, request_id: str, text: Text) -> None:
        params = SamplingParams(temperature=0, max_tokens=len(text.tokens) - text.prompt - CUT, ignore_eos=True)
        params.update_from_generation_config({}, 1)
        self.texts[request_id] = text
        prompt = text.tokens[: text.prompt]
        request = Request(request_id, prompt, params, None, block_hasher=self._hasher)
        # The texts come again and again: their first answers would draft for all others.
        request.outrider = RequestState(APART, Rule.GREEDY)
        self.scheduler.add_request(request)

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        shipper = self.runner.shipper
        assert shipper is not None
        if name == "take_drafting_counters":
            return [shipper.take_counters()]
        assert name == "set_drafters"
        verifier_id, epochs, _, weights = args
        shipper.set_drafters(None, verifier_id, epochs, weights)  # type: ignore[arg-type]
        return [None]

    def post_step(self, executed: bool) -> None:
        pass

    def step_fn(self) -> tuple[Any, bool]:
        scheduler = self.scheduler
        if not scheduler.has_requests():
            return {}, False
        scheduled = scheduler.schedule()
        self._check_drafts(scheduled)
        total = scheduled.total_num_scheduled_tokens
        self._world.advance(self._world.now + (FIXED_S + TOKEN_S * total if total else 0.0))
        if not total:
            self.runner.execute_model(scheduled)
        output = self._run(scheduled) if total else ModelRunnerOutput([], {})
        return scheduler.update_from_output(scheduled, output), total > 0

    def _check_drafts(self, scheduled: Any) -> None:
        """Asserts that what is verified is the beginning of what the speculator has attached."""
        for request_id, tokens in scheduled.scheduled_spec_decode_tokens.items():
            if any(token >= 0 for token in tokens):
                draft = self.scheduler.requests[request_id].outrider.drafting.verified
                assert draft is not None
                assert draft.tokens[: len(tokens)] == tokens

    def _run(self, scheduled: Any) -> ModelRunnerOutput:
        ids, computed, rows, sampled, hidden = list(scheduled.num_scheduled_tokens), [], [], [], []
        ends: list[tuple[int, int]] = []
        for request_id in ids:
            request, text = self.scheduler.requests[request_id], self.texts[request_id]
            n = scheduled.num_scheduled_tokens[request_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            first, length = request.num_computed_tokens - n, request.num_tokens
            emitted: list[int] = []
            if first + n - len(drafts) >= length:
                for at, drafted in enumerate([*drafts, -1]):
                    emitted.append(text.tokens[length + at])
                    if emitted[-1] != drafted:
                        break
            self.decided += len(emitted)
            features = text.features[first : first + n].clone()
            true = n - (len(drafts) - max(len(emitted) - 1, 0)) if emitted else n
            features[true:] = float("nan")  # features of rejected positions must never be sent
            hidden.append(features)
            known = max(length, first + n + 1 - len(drafts))
            rows.append(np.array(text.tokens[:known] + [-1] * (len(emitted) + CUT)))
            ends.append((known, known + len(emitted)))
            computed.append(first)
            sampled.append(emitted)
        self.runner.input_batch = SimpleNamespace(req_ids=ids, num_computed_tokens_cpu=np.array(computed), token_ids_cpu=rows)
        joined = torch.cat(hidden)
        self.runner.execute_model_state = SimpleNamespace(hidden_states=joined, aux_hidden_states=None)
        self.runner.execute_model(scheduled)
        self.scheduler.get_grammar_bitmask(scheduled)
        for request_id, row, (known, end) in zip(ids, rows, ends, strict=True):
            row[known:end] = self.texts[request_id].tokens[known:end]
        self.runner.propose_draft_token_ids(scheduled, sampled)
        self.runner.execute_model_state = None
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled)


class SimulatedVerifier:
    """Runs the real loop until every request is answered; takes the gateways' role, and checks counters on every turn."""

    def __init__(self, world: World, mode: str, blocks: int, lookup: bool) -> None:
        self.world = world
        self.core = SimulatedCore(world, mode, blocks, lookup)
        self.stats = VerifierStats("v", 0.0, mode, K)
        self.core.scheduler.counters = Counters(self.stats)
        hub: Any = world
        core: Any = self.core
        self.links = DraftLinks(hub, core, "v")
        weights: Any = mock.Mock(is_paused=False)
        self.loop = EngineLoop(core, hub, self, self.links, weights)  # type: ignore[arg-type]
        self.answers: dict[str, list[int]] = {}
        """Of all requests so far."""
        self.finished: set[str] = set()
        self.heard: dict[str, float] = {}
        self.longest_silence_s = 0.0

    @property
    def drafted(self) -> int:
        """Verifications of drafters' drafts."""
        return sum(each.drafts for drafter_id, each in self.stats.drafters.items() if drafter_id != LOOKUP)

    def generate(self, texts: dict[str, Text], limit_s: float = 60.0) -> None:
        """Runs all requests at once to their ends, and asserts that their tokens are the target's."""
        for request_id, text in texts.items():
            self.core.add(request_id, text)
            self.answers[request_id] = []
        self._deadline = self.world.now + limit_s
        self.loop._stopping.clear()
        self.loop.run()
        for request_id, text in texts.items():
            expected = text.tokens[text.prompt : len(text.tokens) - CUT]
            assert self.answers[request_id] == expected, f"{request_id}: other tokens than the target's"

    # The methods that the loop calls on its gateway port.

    def receive(self, now: float) -> float:
        self.check()
        if self.finished >= self.answers.keys() and not self.core.scheduler.has_requests():
            self.loop.stop()
        assert now < self._deadline, f"stuck: {sorted(self.answers.keys() - self.finished)}"
        return 0.0

    def send_outputs(self, outputs: Any) -> None:
        now = self.world.now
        for each in outputs.values():
            for output in each.outputs:
                tokens, name = output.new_token_ids, output.request_id
                self.answers[name] += tokens
                if name in self.heard:
                    self.longest_silence_s = max(self.longest_silence_s, now - self.heard[name])
                self.heard[name] = now
                if output.finish_reason is not None:
                    self.finished.add(name)

    def send_stats(self, stats: VerifierStats) -> None:
        pass

    def expire(self, now: float) -> None:
        pass

    def check(self) -> None:
        """Asserts that the speculator's tables and the counters agree with vLLM's scheduler."""
        scheduler = self.core.scheduler
        known, pending = scheduler.speculator.candidates.requests, scheduler.speculator.questions.pending
        assert known.keys() <= scheduler.requests.keys()
        assert pending.keys() <= set(known.values())
        for request, question in pending.items():
            assert question.base_len == scheduler.requests[request.id].num_tokens
        accepted = sum(each.accepted_tokens for each in self.stats.drafters.values())
        decided = self.core.decided
        assert decided == self.stats.verifications + accepted, "tokens = verifications + accepted drafts"
        assert 0 <= decided - self.stats.tokens <= self.stats.num_speculative_tokens * len(self.finished), (
            "less what was cut off"
        )


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Makes verifier code use the world's clock and sockets, for a `with` block."""
    with ExitStack() as stack:
        for module in ("loop", "draft_links", "scheduler", "feature_link", "counting"):
            stack.enter_context(mock.patch(f"backend.engine.{module}.time", world))
        stack.enter_context(connected(functools.partial(SimulatedDealer, world)))
        yield
