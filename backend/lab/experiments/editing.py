"""Measures the gain of look-ups and predictions when a file is asked back with small changes; prints a table.

    python -m backend.lab.experiments.editing

The prompt is a piece of source code.  The answer is the same piece with small changes; it is a fixed response, because no small
model can edit.  So speeds are real, and drafts are accepted as far as they agree with the edited piece.  In a second case the
prompt lacks the piece, and the client sends it as the request's `prediction`, or an earlier request was answered with the
piece in another edition.  Alternating rounds, after one that does not count; one request in flight.
"""

import random
import sys
import tempfile
from pathlib import Path
from statistics import median

from backend.config import Settings
from backend.engine.client import EngineClient, fixed_sampling
from backend.lab.bench.engines import Processes
from backend.lab.bench.plan import split_cores
from backend.lab.bench.prompts import Prompts
from backend.lab.bench.run import prepare
from backend.lab.bench.tables import spread
from backend.models.resolve import resolve
from backend.records.markdown import table
from backend.wire.engine import RequestOptions

TARGET, TOKENS, CHANGES = "S", 256, 6
"""The target, the tokens of a piece, and its changes."""
ROUNDS, REQUESTS = 3, 4
PLAIN, HEAD_ONLY, LOOKUPS = "none", "head alone", "head and look-ups"
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


def clients(processes: Processes) -> dict[str, EngineClient]:
    """A client of a verifier for each way of drafting."""
    _, drafter = processes.drafter("drafter-0", processes.models.drafter_dir)
    found = []
    for mode, lookup in (("off", True), ("auto", False), ("auto", True)):
        settings = {"mode": mode, "verifier": {"lookup": lookup, "engine_args": {"async_scheduling": False}}}
        verifier, client = processes.verifier(f"{mode}-{lookup}", settings)
        found.append(client)
        if mode == "auto":
            verifier.ask([drafter])
    plain, alone, helped = found
    return {PLAIN: plain, HEAD_ONLY: alone, LOOKUPS: helped, PREDICTED: helped, SHARED: helped}


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        demo = resolve(Settings.model_validate({"mode": "sync"}), lambda line: None)
        models = prepare(TARGET, demo, Path(directory))
        with Processes(models, split_cores(), Path(directory)) as processes:
            kinds, make = clients(processes), Prompts(models.target_dir, TOKENS)

            def measure(case: str, kind: str, turn: int) -> float:
                chance = random.Random(f"{turn}/{case}")
                pieces = [make.make(f"edit/{turn}/{case}/{i}") for i in range(REQUESTS + 1)]
                prompts = [piece if CASES[case] else piece[:8] for piece in pieces]
                earlier, answers = ([edited(piece, CHANGES, chance) for piece in pieces] for _ in range(2))
                if kind == SHARED:
                    speed(kinds[kind], prompts, earlier, [RequestOptions()] * len(pieces))
                request_options = [
                    RequestOptions(prediction=piece if kind == PREDICTED else [], learn=kind == SHARED) for piece in pieces
                ]
                return speed(kinds[kind], prompts, answers, request_options)

            found: dict[tuple[str, str], list[float]] = {(case, kind): [] for case in CASES for kind in kinds}
            for turn in range(1 + ROUNDS):
                for cell, speeds in found.items():
                    speeds.append(measure(*cell, turn))
                sys.stderr.write(f"round {turn} of {ROUNDS}\n")
    body = []
    for (case, kind), (_, *speeds) in found.items():
        ratios = [[a / b for a, b in zip(speeds, found[case, base][1:], strict=True)] for base in (PLAIN, HEAD_ONLY)]
        body.append([case, kind, f"{median(speeds):.0f}", *(spread(each, 2) for each in ratios)])
    print("\n".join(table(["", "drafts", "tokens/s", "of plain decoding", "of the head alone"], body)[1:]))


if __name__ == "__main__":
    main()
