"""Measures the gain of drafts from other requests' outputs where several answers to one prompt are sampled; prints a table.

    python -m backend.lab.experiments.samples

Groups of eight samples of one prompt, as trainers ask for them.  One verifier decodes plainly.  Another one drafts in mode
`auto`, for requests that share their outputs and for requests that opt out.  Rounds alternate; every load has its own prompts.
"""

from __future__ import annotations

from contextlib import ExitStack

from backend.lab.bench.engines import LoadResult, assign, measure_load
from backend.lab.bench.load import APART
from backend.lab.bench.prompts import Prompts
from backend.lab.experiments.comparing import NONE, drafter, in_turn, options, points, speeds, started, verifier
from backend.wire.engine import RequestOptions

SAMPLES = 8
KINDS = {NONE: APART, "each for itself": APART, "with others' outputs": RequestOptions()}


def main() -> None:
    parser = options("samples", __doc__, tokens=192)
    parser.add_argument("--temperatures", default="0.5,1")
    parser.add_argument("--concurrency", default="8,32")
    parser.add_argument("--groups", type=int, default=4, help="at least, and twice as many as are in flight")
    given = parser.parse_args()
    with ExitStack() as stack:
        processes = started(given.target, stack)
        ref = drafter(processes, 0, "demo")
        (_, plain), (auto, client) = verifier(processes, "off"), verifier(processes, "auto")
        assign(auto, [ref])
        make = Prompts(processes.bench.models.target_dir, 128)

        def measure(cell: tuple[float, int, str], load: str) -> LoadResult:
            temperature, requests, kind = cell
            groups = max(given.groups, 2 * requests // SAMPLES)
            prompts = [make.make("code", f"{load}/{temperature}/{requests}/{kind}/{i}") for i in range(groups)]
            each = [prompt for prompt in prompts for _ in range(SAMPLES)]
            return measure_load(plain if kind == NONE else client, each, given.tokens, temperature, requests, KINDS[kind])

        cells = [(*point, kind) for point in points(given.temperatures, given.concurrency) for kind in KINDS]
        print("\n".join(speeds(in_turn(cells, given.rounds, measure))))


if __name__ == "__main__":
    main()
