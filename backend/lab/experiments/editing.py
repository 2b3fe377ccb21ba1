"""Measures the gain of look-ups and predictions when a file is asked back with small changes; prints a table.

    python -m backend.lab.experiments.editing

The prompt is a piece of source code.  The answer is the same piece with small changes; it is a fixed response, because no small
model can edit.  So speeds are real, and drafts are accepted as far as they agree with the edited piece.  In a second case the
prompt lacks the piece, and the client sends it as the request's `prediction`, or an earlier request was answered with the
piece in another edition.  Alternating rounds; one request in flight.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from statistics import median

from backend.engine.client import EngineClient, fixed_sampling
from backend.lab.bench.engines import assign
from backend.lab.bench.markdown import spread, table
from backend.lab.bench.prompts import Prompts
from backend.lab.experiments.comparing import NONE, drafter, in_turn, options, started, verifier
from backend.wire.engine import RequestOptions

HEAD_ONLY, LOOKUPS = "head alone", "head and look-ups"
PREDICTED, SHARED = "head, look-ups, prediction", "head, look-ups, an earlier answer"
CASES = {"file in the prompt": True, "file in the prediction alone": False}


def edited(tokens: list[int], changes: int, chance: random.Random) -> list[int]:
    """The tokens after `changes` edits, each of which replaces one to four tokens by none to four others."""
    found = list(tokens)
    for _ in range(changes):
        at, count = chance.randrange(len(found) - 8), chance.randrange(1, 5)
        instead = [chance.choice(tokens) for _ in range(chance.randrange(5))]
        found[at : at + count] = instead
    return found


def speed(
    client: EngineClient, prompts: list[list[int]], answers: list[list[int]], request_options: list[RequestOptions]
) -> float:
    """Tokens per second of these requests, run one at a time; the first only warms up."""
    spent, count = 0.0, 0
    for i, (prompt, answer, each) in enumerate(zip(prompts, answers, request_options, strict=True)):
        request_id = client.add(prompt, fixed_sampling(answer, 0.0), options=each)
        client.finish_all()
        found = client.answers.pop(request_id)
        assert found.tokens == answer
        if i:
            spent, count = spent + found.last_at - found.sent_at, count + len(answer)
    return count / spent


def main() -> None:
    parser = options("editing", __doc__, tokens=256)
    parser.add_argument("--changes", type=int, default=6, help="of a piece, which has --tokens tokens")
    parser.add_argument("--requests", type=int, default=4)
    given = parser.parse_args()
    with ExitStack() as stack:
        processes = started(given.target, stack)
        ref = drafter(processes, 0, "demo")
        plain, alone, helped = (verifier(processes, *each) for each in (("off",), ("auto", False), ("auto",)))
        for child, _ in (alone, helped):
            assign(child, [ref])
        kinds = {NONE: plain, HEAD_ONLY: alone, LOOKUPS: helped, PREDICTED: helped, SHARED: helped}
        make = Prompts(processes.bench.models.target_dir, given.tokens)

        def measure(cell: tuple[str, str], load: str) -> float:
            case, kind = cell
            client, chance = kinds[kind][1], random.Random(f"{load}/{case}")
            pieces = [make.make("code", f"edit/{load}/{case}/{i}") for i in range(given.requests + 1)]
            prompts = [piece if CASES[case] else piece[:8] for piece in pieces]
            earlier, answers = ([edited(piece, given.changes, chance) for piece in pieces] for _ in range(2))
            if kind == SHARED:
                speed(client, prompts, earlier, [RequestOptions()] * len(pieces))
            request_options = [
                RequestOptions(prediction=piece if kind == PREDICTED else [], learn=kind == SHARED) for piece in pieces
            ]
            return speed(client, prompts, answers, request_options)

        found = in_turn([(case, kind) for case in CASES for kind in kinds], given.rounds, measure, learning=1)
    body = []
    for (case, kind), speeds in found.items():
        ratios = [[a / b for a, b in zip(speeds, found[case, base], strict=True)] for base in (NONE, HEAD_ONLY)]
        body.append([case, kind, f"{median(speeds):.0f}", *(spread(each, 2) for each in ratios)])
    print("\n".join(table(["", "drafts", "tokens/s", "of plain decoding", "of the head alone"], body)))


if __name__ == "__main__":
    main()
