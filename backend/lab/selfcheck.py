"""`outrider selfcheck`: does a GPU draft what a CPU drafts, are texts the same, and how long does each part of a draft take?"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend import noise
from backend.drafter.proposer import MAX_OUTCOMES, Drafted, Sampling, Until
from backend.lab.bench.hardware import about
from backend.lab.random_heads import LARGE, NEW_ROWS, SMALL, TYPES, Requests, proposer_of, random_head
from backend.models.head_config import HeadConfig
from backend.records.markdown import table
from backend.speculation.calibration import Calibration
from backend.speculation.chances import Rule
from backend.wire.drafting import Outcome
from outrider import Fleet, OutriderError, Sample

Row = dict[str, Any]
K, FLOOR = 8, 0.1
WHOLE = Until(K)
UNTIL = Until(K, FLOOR, [Calibration(K).weights for _ in Rule])
"""As verifiers ask for drafts, with the weights that they begin with.  Greedy drafts of these heads have about six tokens."""
FEW_OUTCOMES = 4
REPEATS, MOST_S = 15, 2.0
"""Runs of which a time is the median; fewer if they take so many seconds together."""
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
SAMPLINGS = {
    "greedy": Sampling(1, 0.0),
    "shared noise": Sampling(2, 1.0),
    "independent": Sampling(3, 1.0, independent=True),
}
PROMPTS = ["def read(", "import os\n", "class Cache:\n", "for line in "]
TEXTS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0, "seed": 1}}


def check_texts() -> Iterator[Row]:
    """Texts of the demo model with and without drafts: the same?  In float32: bfloat16's rounding decides near ties."""
    samples_of: list[list[Sample]] = []
    try:
        for mode in ("off", "auto"):
            settings: dict[str, Any] = {"drafters": int(mode != "off"), "verifier_engine_args": {"dtype": "float32"}}
            with Fleet("demo", mode=mode, **settings) as fleet:
                for rule in TEXTS.values():
                    samples = fleet.generate(PROMPTS, {**rule, "max_tokens": 128, "ignore_eos": True}, n=4)
                    samples_of.append(sorted(samples, key=attrgetter("index", "sample")))
    except OutriderError as error:
        yield {"failed": error.message}
        return
    for rule_name, plain, drafted in zip(TEXTS, samples_of[: len(TEXTS)], samples_of[len(TEXTS) :], strict=True):
        spent = [each.account["tokens_per_verification"] for each in drafted if each.account]
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
        yield {"texts": rule_name, "same": same / len(plain), "tokens per verification": statistics.fmean(spent)}


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


def check_drafts(device: str, configs: Mapping[str, HeadConfig], requests: int, length: int) -> Iterator[Row]:
    """Drafts and outcomes of small heads: the same as in float32 on the CPU, and as on the GPU without graphs?

    Samples cannot be the same, so of independent drafts the likeliest first token is compared.
    """
    for name, config in configs.items():
        for dtype in TYPES:
            weights = random_head(replace(config, dtype=dtype))
            others = {"": proposer_of(weights, 16 * 1024, "cpu")}
            if device == "cuda":
                others[" without graphs"] = proposer_of(weights, 16 * 1024, device, graphs=False)
            proposer = proposer_of(weights, 16 * 1024, device)
            for rule, sampling in SAMPLINGS.items():
                held = Requests(proposer, requests, length, [sampling])
                drafts = held.commit_and_draft(UNTIL)
                outcomes = held.enumerate(drafts, FEW_OUTCOMES, UNTIL)
                same: Callable[[Drafted], Any] = _likeliest if sampling.independent else attrgetter("tokens")
                row: Row = {"weights": name, "type": dtype, "rule": rule}
                row["tokens"] = statistics.fmean(len(each.tokens) for each in drafts)
                for where, other in others.items():
                    its = Requests(other, requests, length, [sampling])
                    found = its.commit_and_draft(UNTIL)
                    row[f"same{where}"] = sum(same(a) == same(b) for a, b in zip(drafts, found, strict=True)) / requests
                    # Both enumerate behind the same draft.
                    ahead = its.enumerate(drafts, FEW_OUTCOMES, UNTIL)
                    row[f"same outcomes{where}"] = None if sampling.independent else _same_outcomes(outcomes, ahead)
                yield row


def _likeliest(drafted: Drafted) -> bytes:
    """The likeliest token of the first token's distribution."""
    return drafted.proposal[:4]


def _same_outcomes(one: list[list[Outcome]], two: list[list[Outcome]]) -> float | None:
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


def time_drafts(
    device: str, configs: Mapping[str, HeadConfig], batches: Sequence[tuple[str, int]], length: int
) -> Iterator[Row]:
    """Milliseconds of a draft's parts, and CUDA's calls in them."""
    most = max(count for _, count in batches)
    for name, config in configs.items():
        weights = random_head(config, device)
        for graphs in (True, False) if device == "cuda" else (False,):
            # A text that outgrows its stretch of the cache needs the next one before it gives that back.
            proposer = proposer_of(weights, (most + 1) * 2048, device, graphs)
            for rule, count in batches:
                for key in range(most):
                    proposer.close(key)
                held = Requests(proposer, count, length, [SAMPLINGS[rule]])
                row: Row = {"weights": name, "rule": rule, "requests": count, "graphs": graphs}
                row[f"confirm {NEW_ROWS}, ms"] = median_ms(device, partial(held.commit_and_draft, Until(0)))
                draft, whole = partial(held.draft, UNTIL), partial(held.draft, WHOLE)
                row[f"draft {K}, ms"] = median_ms(device, draft)
                row["calls to draft"] = calls(device, draft)
                for outcomes in (FEW_OUTCOMES, MAX_OUTCOMES):
                    enumerate_all = partial(held.enumerate, whole(), outcomes, UNTIL)
                    row[f"enumerate {outcomes}, ms"] = median_ms(device, enumerate_all, whole)
                    row[f"calls to enumerate {outcomes}"] = calls(device, enumerate_all)
                yield row


def median_ms(device: str, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median time of `run`, until the device is done; the time of `before`, which comes first, does not count."""
    times: list[float] = []
    end = time.perf_counter() + MOST_S
    while len(times) < REPEATS + 3 and (len(times) < 6 or time.perf_counter() < end):
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
        return ", ".join(f"{key} {_text(count)}" for key, count in value.items())
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: list[str], say: Callable[[str], None]) -> None:
    """Runs all checks, prints their tables and writes them to a file."""
    parser = argparse.ArgumentParser(prog="outrider selfcheck", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("selfcheck.json"), help="file for the figures (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, no fleets: to see that it runs, also without a GPU")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("torch sees no GPU here; with --quick the checks run on the CPU alone")
    found: dict[str, Any] = about(["outrider", "selfcheck", *arguments], [])
    quick = [("greedy", 1), ("independent", 2)]
    full = [("greedy", 1), ("greedy", 16), ("greedy", 64), ("shared noise", 64), ("independent", 1), ("independent", 64)]
    # Fleets first, while they find the GPU's memory free.
    texts = {} if options.quick else {"Texts": check_texts()}
    parts = {
        **texts,
        "Noise": check_noise(device, 5000, 8) if options.quick else check_noise(device, 150_000, 256),
        "Drafts": check_drafts(device, SMALL, *((2, 20) if options.quick else (12, 200))),
        "Time of noise": time_noise(device, *((5000, [1, 2]) if options.quick else (150_000, [1, 64, 576]))),
        "Time of drafts": time_drafts(device, *((SMALL, quick, 20) if options.quick else (LARGE, full, 1000))),
    }
    for name, rows in parts.items():
        say(f"\n{name}\n")
        found[name] = []
        for row in rows:
            lines = table(list(row), [[_text(value) for value in row.values()]])[1:]
            say("\n".join(lines[2:] if found[name] else lines))
            found[name].append(row)
            options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    say(f"\n{options.output} has all figures")
