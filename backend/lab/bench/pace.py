"""Computes how long a step would take on a stated accelerator: `--pace` with its profiles and counters.  Pure.

A pass over a model costs a fixed time, in which every weight is read once, and a time per token for the arithmetic.  From the
data sheet of NVIDIA's H100 SXM, https://www.nvidia.com/en-us/data-center/h100/ (3.35 TB/s; 989 TFLOPS dense bfloat16), with
80 % of the bandwidth and half of the arithmetic reached, for P parameters on N devices:

    fixed     = 2 P bytes / (N x 0.8 x 3.35 TB/s)        per token = 2 P FLOP / (N x 0.5 x 989 TFLOPS)

The formula leaves out the reading of the KV cache (131 kB per token of context with 8B, 328 kB with 70B), and that reading and
arithmetic overlap.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

BYTES_PER_S = 0.8 * 3.35e12
FLOP_PER_S = 0.5 * 989e12
ALL_REDUCES_MS = 2 * 80 * 0.005
"""All-reduces of Llama 70B on several devices: two in each of 80 layers, of 5 us each."""
LAUNCH_MS = 0.17
"""What a head's pass takes beyond the reading of its weights, with CUDA graphs and the choice of a token, at one request.

Measured on an H200: 0.34 ms a token, of which the weights take 0.17 (`benchmarks/results/h200-drafter`)."""
DRAW_MS, DRAW_US = 0.14, 2.4
"""What sampling a token takes beyond choosing it by its probability or with shared noise, and per row; measured likewise."""


@dataclass(frozen=True)
class Cost:
    """Time of one pass over a model: a fixed part, and a part per token."""

    fixed_ms: float
    token_us: float

    def seconds(self, tokens: float) -> float:
        return self.fixed_ms / 1e3 + tokens * self.token_us / 1e6

    def slower(self, factor: float) -> Cost:
        return Cost(self.fixed_ms * factor, self.token_us * factor)

    def __str__(self) -> str:
        return f"{self.fixed_ms:.3g} ms + {self.token_us:.3g} us per token"


@dataclass(frozen=True)
class HeadCost:
    """Times of a draft head's passes."""

    token: Cost = Cost(0.0, 0.0)
    """Of a head that drafts token by token, with the choice of the next token."""
    block: Cost = Cost(0.0, 0.0)
    """Of a head that drafts in one pass."""
    store: Cost = Cost(0.0, 0.0)
    """Of the keys and values that such a head makes from the target's features."""
    first: Cost = Cost(0.0, 0.0)
    """Of the choice of a draft's first token, which needs no pass of its own."""
    draw: Cost = Cost(0.0, 0.0)
    """What sampling a token adds to its choice."""

    def slower(self, factor: float) -> HeadCost:
        costs = self.token, self.block, self.store, self.first, self.draw
        return HeadCost(*(cost.slower(factor) for cost in costs))

    def __str__(self) -> str:
        block = "" if self.block == self.token else f" (of a one-pass head {self.block}, and {self.store} for its context)"
        return f"{self.token}{block}"


def _cost(parameters: float, devices: int, more_ms: float = 0.0) -> Cost:
    return Cost(2e3 * parameters / (devices * BYTES_PER_S) + more_ms, 2e6 * parameters / (devices * FLOP_PER_S))


@dataclass(frozen=True)
class Pace:
    """Minimum times of a target step, and of a draft pass on a drafter's device or (`native`) on the target's devices."""

    name: str
    target: Cost
    drafter: HeadCost = HeadCost()
    native: HeadCost = HeadCost()

    def __str__(self) -> str:
        return f"`{self.name}`: target step {self.target}; draft pass {self.drafter}, in `native` {self.native}"


HEAD_8B, HEAD_70B = 0.374e9, 1.20e9
"""Parameters that a pass of an EAGLE-3 head reads: one layer whose q, k and v take two hidden states, 32,000 output rows."""
BLOCK_8B, BLOCK_70B = 1.62e9, 5.33e9
"""Parameters that a pass of a DFlash head reads: five layers like the target's, and the target's 128,256 output rows."""
STORE_8B, STORE_70B = 0.126e9, 0.419e9
"""Parameters that make a DFlash head's context: `fc` over five layers' features, and five layers' k and v."""


def _head(token: float, block: float, store: float, devices: int) -> HeadCost:
    passes = _cost(token, devices, LAUNCH_MS), _cost(block, devices, LAUNCH_MS), _cost(store, devices)
    return HeadCost(*passes, Cost(LAUNCH_MS, 0.0), Cost(DRAW_MS, DRAW_US))


PROFILES: Mapping[str, Pace] = {
    "8b": Pace("8b", _cost(8.03e9, 1), *[_head(HEAD_8B, BLOCK_8B, STORE_8B, 1)] * 2),
    "70b": Pace(
        "70b",
        _cost(70.6e9, 4, ALL_REDUCES_MS),
        _head(HEAD_70B, BLOCK_70B, STORE_70B, 1),
        _head(HEAD_70B, BLOCK_70B, STORE_70B, 4),
    ),
}
"""Llama 3.1 8B on one H100, and Llama 3.3 70B on four; a drafter process has one H100."""


def parse_pace(text: str) -> Pace:
    """Parses a profile's name, or pairs `MS,US` (fixed ms, us per token); either may be followed by `@` and a factor.

    Up to three pairs are for a target step, a draft pass, and a draft pass in mode `native`.  With 70b@4 everything takes four
    times as long: ratios stay, and a slower machine can keep up.  Raises `ArgumentTypeError`.
    """
    given, _, factor = text.partition("@")
    known = PROFILES.get(given)
    try:
        times, *numbers = (float(part) for part in (factor or "1", *(() if known else given.split(","))))
    except ValueError:
        times, numbers = 0.0, []
    costs = [Cost(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=False)]
    sane = 0 < times < float("inf") and all(0 <= number < float("inf") for number in numbers)
    if not sane or not (known or costs) or len(numbers) % 2 or len(costs) > 3:
        profiles = ", ".join(PROFILES)
        raise ArgumentTypeError(f"{text!r}: there are {profiles}, and two, four or six numbers as in 6,32,0.4,1.5 or 70b@4")
    if known is None:
        heads = [HeadCost(cost, cost) for cost in costs[1:]] or [HeadCost()]
        known = Pace(text, costs[0], heads[0], heads[-1])
    return Pace(text, known.target.slower(times), known.drafter.slower(times), known.native.slower(times))


class Paced(msgspec.Struct):
    """Counters of a paced process since its start.  In an overrun, this machine took longer than the stated device."""

    passes: int = 0
    paced_s: float = 0.0
    overruns: int = 0
    overrun_s: float = 0.0

    def since(self, earlier: Paced) -> Paced:
        return Paced(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))
