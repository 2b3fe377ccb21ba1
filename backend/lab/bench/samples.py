"""Measures the gain of drafts from other requests' outputs where several answers to one prompt are sampled; prints a table.

    python -m backend.lab.bench.samples

Groups of eight samples of one prompt, as trainers ask for them.  One verifier decodes plainly.  Another one drafts in mode
`auto`, for requests that share their outputs and for requests that opt out.  Rounds alternate; every load has its own prompts.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from statistics import median

from backend.lab.bench.drafters import LEARNING, drafter, started, verifier
from backend.lab.bench.engines import Speed, assign, measure_load
from backend.lab.bench.load import APART
from backend.lab.bench.prompts import Prompts
from backend.wire.engine import RequestOptions

SAMPLES = 8
KINDS = {"none": APART, "each for itself": APART, "with others' outputs": RequestOptions()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m backend.lab.bench.samples", description=__doc__)
    parser.add_argument("--target", default="S", help="demo, or widened to S or L")
    parser.add_argument("--temperatures", default="0.5,1")
    parser.add_argument("--concurrency", default="8,32")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--groups", type=int, default=4, help="at least, and twice as many as are in flight")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    points = [(float(t), int(n)) for t in given.temperatures.split(",") for n in given.concurrency.split(",")]
    found: dict[tuple[float, int, str], list[Speed]] = {}
    with ExitStack() as stack:
        processes = started(given.target, stack)
        ref = drafter(processes, 0, "demo")
        (_, plain), (auto, client) = verifier(processes, "off"), verifier(processes, "auto")
        assign(auto, [ref])
        make = Prompts(processes.models.target_dir, 128)
        for turn in range(-1, given.rounds):
            for point in points:
                for kind, asked in KINDS.items():
                    for load in range(1 if turn >= 0 else LEARNING):
                        groups = max(given.groups, 2 * point[1] // SAMPLES)
                        prompts = [make.make("code", f"{turn}/{load}/{point}/{kind}/{i}") for i in range(groups)]
                        each = [prompt for prompt in prompts for _ in range(SAMPLES)]
                        one = measure_load(plain if kind == "none" else client, each, given.tokens, *point, asked)
                        if turn >= 0:
                            found.setdefault((*point, kind), []).append(one)
    lines = ["| temperature | in flight | drafts | tokens/s | of plain decoding | tokens per drafted verification |"]
    lines.append("|---|---|---|---|---|---|")
    for (temperature, n, kind), each_round in found.items():
        base = found[temperature, n, "none"]
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(each_round, base, strict=True)]
        speeds, lengths = [one.tokens_per_s for one in each_round], [one.length for one in each_round]
        told = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | {median(lengths):.2f}"
        lines.append(f"| {temperature:g} | {n} | {kind} | {median(speeds):.0f} | {told} |")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
