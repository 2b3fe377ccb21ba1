"""Compares different drafters for one target: each alone, and sets of several, of which each request gets one.

    python -m backend.lab.experiments.drafters --sets demo backend/models/demo/draft-model demo+backend/models/demo/draft-model

One verifier in mode `auto` gets each set of drafters in turn, in alternating rounds; another verifier decodes plainly.  With
`A+B` requests get the drafter that drafts better for them; with `A=B` a request's id alone decides.  All drafters share
one core.  Prints a table, and writes it to `--output`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec

from backend.lab.bench.engines import LoadResult, assign, measure_load
from backend.lab.bench.prompts import Prompts
from backend.lab.experiments.comparing import NONE, drafter, in_turn, options, points, speeds, started, verifier


def main() -> None:
    parser = options("drafters", __doc__, tokens=128)
    parser.add_argument("--sets", nargs="+", required=True, help="drafters, A+B: of which requests get the better, A=B: either")
    parser.add_argument("--domains", default="code", help="code,prose: requests of both, by turns")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    sets: dict[str, list[str]] = {NONE: []} | {each: each.replace("=", "+").split("+") for each in given.sets}
    with ExitStack() as stack:
        processes = started(given.target, stack)
        names = sorted({name for members in sets.values() for name in members})
        refs = {name: drafter(processes, number, name) for number, name in enumerate(names)}
        (_, plain), (auto, client) = verifier(processes, "off"), verifier(processes, "auto")
        make, domains = Prompts(processes.bench.models.target_dir, 128), given.domains.split(",")

        def measure(cell: tuple[float, int, str], load: str) -> LoadResult:
            temperature, requests, chosen = cell
            members = [refs[name] for name in sets[chosen]]
            if "=" in chosen:
                members = [msgspec.structs.replace(ref, head="") for ref in members]
            assign(auto, members)
            prompts = [
                make.make(domains[i % len(domains)], f"{load}/{temperature}/{requests}/{i}") for i in range(given.requests)
            ]
            return measure_load(plain if chosen == NONE else client, prompts, given.tokens, temperature, requests)

        cells = [(*point, chosen) for chosen in sets for point in points(given.temperatures, given.concurrency)]
        text = "\n".join(speeds(in_turn(cells, given.rounds, measure)))
    print(text)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
