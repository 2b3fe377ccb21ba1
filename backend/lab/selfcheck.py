"""`outrider selfcheck`: does the drafter compute the same on a GPU as on the CPU, and how long does each part take?

Heads with random weights stand for published ones: what a pass computes and how long it takes does not depend on the weights.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend import noise
from backend.drafter.dflash import DFlashProposer
from backend.drafter.eagle import EagleProposer, ModelProposer
from backend.drafter.proposer import Drafted, DraftRequest, Premise, Sampling, Until
from backend.lab.bench.hardware import about
from backend.lab.bench.markdown import table
from backend.models.checkpoint import HeadWeights
from backend.models.head_config import DFLASH, DRAFT_MODEL, DSPARK, HeadConfig, OnePassDrafting, Rope
from backend.models.layout import required_tensors

Row = dict[str, Any]
K = 8
OUTCOMES = 4
NEW_ROWS = 3
"""Tokens that a verification confirms, in the measurements of time."""
REPEATS = 15
CALLS = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
)
"""What is counted of CUDA's calls."""

_HEAD = HeadConfig(
    kind="eagle3",
    model_type="llama",
    hidden_size=512,
    target_hidden_size=512,
    intermediate_size=1024,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=32000,
    draft_vocab_size=8000,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope=Rope(500000.0, "default", {}),
    dtype="float32",
    unsupported=(),
)
_ONE_PASS = replace(_HEAD, kind=DFLASH, model_type="qwen3", num_layers=2, block=OnePassDrafting(3, 0, (False, True), (0, 0)))
SMALL = {
    "head": _HEAD,
    "one-pass head": _ONE_PASS,
    "one-pass head with a Markov head": replace(
        _ONE_PASS, kind=DSPARK, block=OnePassDrafting(3, 0, (False, True), (0, 0), anchored=True, markov_rank=64)
    ),
    "head of two layers": replace(_HEAD, kind="eagle", num_layers=2, draft_vocab_size=32000),
    "draft model": replace(_HEAD, kind=DRAFT_MODEL, model_type="qwen3", num_layers=4, draft_vocab_size=32000),
}
_HEAD_OF_8B = replace(
    _HEAD, hidden_size=4096, target_hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)
_ONE_PASS_OF_8B = replace(
    _HEAD_OF_8B,
    kind=DFLASH,
    model_type="qwen3",
    intermediate_size=12288,
    num_layers=5,
    vocab_size=151936,
    draft_vocab_size=151936,
    block=OnePassDrafting(3, 15, (False,) * 5, (0,) * 5),
)
LARGE = {
    "EAGLE-3 head of an 8B target": replace(_HEAD_OF_8B, intermediate_size=14336, vocab_size=128256, draft_vocab_size=32000),
    "DFlash head of an 8B target, 5 layers": _ONE_PASS_OF_8B,
    "DSpark head of an 8B target, 5 layers": replace(
        _ONE_PASS_OF_8B, kind=DSPARK, block=OnePassDrafting(3, 15, (False,) * 5, (0,) * 5, anchored=True, markov_rank=256)
    ),
    "draft model of 0.6B, 28 layers": replace(
        _HEAD_OF_8B,
        kind=DRAFT_MODEL,
        model_type="qwen3",
        hidden_size=1024,
        target_hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        vocab_size=151936,
        draft_vocab_size=151936,
    ),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAMPLINGS = {
    "greedy": Sampling(1, 0.0),
    "shared noise": Sampling(2, 1.0),
    "independent": Sampling(3, 1.0, independent=True),
}


def random_head(config: HeadConfig, device: str = "cpu") -> HeadWeights:
    """A head or draft model with random weights, drawn on a device, whose logits have a standard deviation of about 4."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = TYPES[config.dtype]

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return torch.empty(shape, device=device).normal_(0, scale, generator=generator).to("cpu", dtype)

    shapes = required_tensors(config)
    is_cut = shapes.pop("d2t", None) is not None
    shapes.pop("lm_head.weight", None)
    tensors = {n: draw(s, 2 * s[1] ** -0.5) if len(s) == 2 else 1 + draw(s, 0.1) for n, s in shapes.items()}
    hidden = config.hidden_size
    return HeadWeights(
        config,
        tensors,
        draw((config.vocab_size, hidden), 1.0),
        draw((config.draft_vocab_size, hidden), 4 * hidden**-0.5),
        torch.arange(config.draft_vocab_size) * (config.vocab_size // config.draft_vocab_size) if is_cut else None,
        config.max_position,
        frozenset(),
        None,
    )


@dataclass
class Requests:
    """Requests of one proposer, all with texts of one length; every text and feature is random but repeatable."""

    proposer: EagleProposer
    count: int
    length: int
    samplings: Sequence[Sampling]

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(5)
        self._rows = torch.randn(self.length + 40, self.proposer.hidden, generator=self._random).to(self.proposer.dtype)
        self.lengths = [self.length + 7 * (i % 5) for i in range(self.count)]
        for key in range(self.count):
            tokens = self._tokens(self.lengths[key])
            rows = len(tokens) - 1 if self.proposer.hidden else 0
            self.proposer.open(key, tokens, rows, self.samplings[key % len(self.samplings)])
            self.proposer.draft([DraftRequest(key, len(tokens), rows, self._features(rows))])
            # A draft model reads a long prompt in several batches.
            self.proposer.draft([DraftRequest(key, len(tokens), 0, None, Until(1))])

    def commit_and_draft(self, k: int) -> list[Drafted]:
        """Adds `NEW_ROWS` tokens to every text; drafts `k` tokens for each."""
        asks = []
        for key in range(self.count):
            self.lengths[key] += NEW_ROWS
            rows = NEW_ROWS if self.proposer.hidden else 0
            self.proposer.commit(key, self.lengths[key], self._tokens(NEW_ROWS), rows)
            asks.append(DraftRequest(key, self.lengths[key], rows, self._features(rows), Until(k)))
        return self.proposer.draft(asks)

    def draft(self) -> list[Drafted]:
        """Drafts anew for all texts as they are: the same tokens, unless they are samples."""
        return self.proposer.draft([DraftRequest(key, self.lengths[key], 0, None, Until(K)) for key in range(self.count)])

    def enumerate(self, drafts: list[Drafted]) -> list[list[Any]]:
        """Outcomes of the verification of `drafts`."""
        return self.proposer.draft_outcomes(
            [Premise(key, self.lengths[key], Until(K), drafts[key].tokens, OUTCOMES) for key in range(self.count)]
        )

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(0, 30000, (count,), generator=self._random).tolist()

    def _features(self, rows: int) -> Tensor | None:
        return self._rows[:rows] if self.proposer.hidden else None


def proposer_of(weights: HeadWeights, cache_tokens: int, device: str, graphs: bool = True) -> EagleProposer:
    """Drafts with these weights on a device."""
    made = {DRAFT_MODEL: ModelProposer, DFLASH: DFlashProposer}.get(weights.config.drafter_kind, EagleProposer)
    return made(weights, cache_tokens, device, graphs)


def check_noise(device: str, vocabulary: int, rows: int) -> Iterator[Row]:
    """Tokens chosen with noise: on both devices the same?"""
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocabulary, generator=random) * 4
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)
    positions = torch.randint(0, 100_000, (rows,), generator=random)
    tokens = torch.randint(0, vocabulary, (rows, 64), generator=random)
    ones = torch.ones(rows)
    given = logits, seeds, positions, ones, ones
    there = logits.to(device), seeds.to(device), positions.to(device), ones.to(device), ones.to(device)
    here, found = noise.choose(*given), noise.choose(*there)
    ranked, found_ranked = noise.rank(*given, 5), noise.rank(*there, 5)
    drawn, found_drawn = noise.gumbel(seeds, positions, tokens), noise.gumbel(there[1], there[2], tokens.to(device))
    yield {
        "vocabulary": vocabulary,
        "rows": rows,
        "same choice": _share(here.columns, found.columns.cpu()),
        "same five best": _share(ranked[0], found_ranked[0].cpu()),
        "score differs by at most": (here.scores - found.scores.cpu()).abs().max().item(),
        "noise differs by at most": (drawn - found_drawn.cpu()).abs().max().item(),
    }


def _share(one: Tensor, two: Tensor) -> float:
    return (one == two).double().mean().item()


def check_drafts(device: str, configs: dict[str, HeadConfig], requests: int, length: int) -> Iterator[Row]:
    """Drafts and outcomes of small heads: on both devices the same?  The reference is float32 on the CPU.

    Samples cannot be the same, so of independent drafts the likeliest first token is compared.
    """
    for name, config in configs.items():
        for dtype in TYPES:
            weights = random_head(replace(config, dtype=dtype))
            proposers = [proposer_of(weights, 16 * 1024, where) for where in ("cpu", device)]
            for rule, sampling in SAMPLINGS.items():
                here, there = (Requests(proposer, requests, length, [sampling]) for proposer in proposers)
                drafts, found = here.commit_and_draft(K), there.commit_and_draft(K)
                same: Callable[[Drafted], Any] = _likeliest if sampling.independent else attrgetter("tokens")
                row: Row = {"weights": name, "type": dtype, "rule": rule}
                row["same"] = sum(same(a) == same(b) for a, b in zip(drafts, found, strict=True)) / requests
                if not sampling.independent:
                    # Both enumerate behind the same draft.
                    row["same outcomes"] = _same_outcomes(here.enumerate(drafts), there.enumerate(drafts))
                yield row


def _likeliest(drafted: Drafted) -> bytes:
    """The likeliest token of the first token's distribution."""
    return drafted.proposal[:4]


def _same_outcomes(one: list[list[Any]], two: list[list[Any]]) -> float | None:
    pairs = [(a, b) for these, those in zip(one, two, strict=True) for a, b in zip(these, those, strict=True)]
    same = sum((a.accepted, a.token, list(a.tokens)) == (b.accepted, b.token, list(b.tokens)) for a, b in pairs)
    return same / len(pairs) if pairs else None


def time_noise(device: str, vocabulary: int, sizes: Sequence[int]) -> Iterator[Row]:
    """Milliseconds to choose a token in each of many rows, and the rate at which logits are read."""
    for count in sizes:
        logits = torch.randn(count, vocabulary, device=device)
        seeds = torch.arange(count, device=device)
        ones = torch.ones(count, device=device)
        spent = median_ms(device, partial(noise.choose, logits, seeds, seeds, ones, ones))
        yield {"vocabulary": vocabulary, "rows": count, "ms": spent, "GB/s": logits.nbytes / spent / 1e6}


def time_drafts(device: str, configs: dict[str, HeadConfig], batches: Sequence[tuple[str, int]], length: int) -> Iterator[Row]:
    """Milliseconds of a draft's parts, and CUDA's calls in them."""
    most = max(count for _, count in batches)
    for name, config in configs.items():
        weights = random_head(config, device)
        for graphs in (True, False) if device == "cuda" else (False,):
            proposer = proposer_of(weights, most * 2048, device, graphs)
            for rule, count in batches:
                for key in range(most):
                    proposer.close(key)
                held = Requests(proposer, count, length, [SAMPLINGS[rule]])
                confirm = median_ms(device, partial(held.commit_and_draft, 0))
                enumerate_all = partial(held.enumerate, held.draft())
                yield {
                    "weights": name,
                    "rule": rule,
                    "requests": count,
                    "graphs": graphs,
                    f"confirm {NEW_ROWS}, ms": confirm,
                    f"draft {K}, ms": median_ms(device, held.draft),
                    f"enumerate {OUTCOMES}, ms": median_ms(device, enumerate_all, held.draft),
                    "calls to draft": calls(device, held.draft),
                    "calls to enumerate": calls(device, enumerate_all),
                }


def median_ms(device: str, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median time of `run`, until the device is done; the time of `before`, which comes first, does not count."""
    times = []
    for _ in range(REPEATS + 3):
        before()
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:]) * 1e3


def calls(device: str, run: Callable[[], object]) -> dict[str, int]:
    """How often `run` starts kernels or graphs, copies, and waits; empty without a GPU."""
    if device != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
    return {event.key: event.count for event in seen.key_averages() if event.key in CALLS}


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items())
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str], say: Callable[[str], None]) -> None:
    """Runs all checks, prints their tables and writes them to a file."""
    parser = argparse.ArgumentParser(prog="outrider selfcheck", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("selfcheck.json"), help="file for the figures (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it runs, on a machine without a GPU too")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("torch sees no GPU here; with --quick the checks run on the CPU alone")
    found: dict[str, Any] = about(["outrider", "selfcheck", *arguments], [])
    quick = [("greedy", 1), ("independent", 2)]
    full = [("greedy", 1), ("greedy", 16), ("greedy", 64), ("shared noise", 64), ("independent", 1), ("independent", 64)]
    parts = {
        "Noise": check_noise(device, 5000, 8) if options.quick else check_noise(device, 150_000, 256),
        "Drafts": check_drafts(device, SMALL, *((2, 20) if options.quick else (12, 200))),
        "Time of noise": time_noise(device, *((5000, [1, 2]) if options.quick else (150_000, [1, 64, 576]))),
        "Time of drafts": time_drafts(device, *((SMALL, quick, 20) if options.quick else (LARGE, full, 1000))),
    }
    for name, rows in parts.items():
        say(f"\n{name}\n")
        found[name] = []
        for row in rows:
            lines = table(list(row), [[_text(value) for value in row.values()]])
            say("\n".join(lines[2:] if found[name] else lines))
            found[name].append(row)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    say(f"\n{options.output} has all figures")
