"""`make bench-rollouts`: compares rollouts of one batch with native and with disaggregated drafting.

Parent process.

    python -m backend.lab.experiments.rollouts --output DIR [--prompts 128] [--n 4] [--longest 2000] [--rounds 3] [flags]

A round is one rollout in each way: `outrider rollout` with a fleet of its own, on the same fixed responses.  Responses are cut
from Python's standard library; their lengths are uniform on a logarithmic scale.  The order of ways changes between rounds.
Further flags (`--num-speculative-tokens`, `--verifier-max-num-seqs`, ...) go to all rollouts.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backend.lab.bench import hardware
from backend.lab.bench.markdown import spread, table
from backend.rollout.make import SHORTEST, STDLIB, make_trace
from backend.rollout.options import TraceOptions
from backend.rollout.trace import read_trace, write_cases

WAYS: Mapping[str, tuple[str, ...]] = {"native": ("--mode", "native"), "disaggregated": ("--drafters", "2")}
LONGEST_PROMPT = 256


def prepare(file: Path, prompts: int, n: int, longest: int) -> str:
    """Writes a trace with `n` responses to each prompt; returns a line that describes it."""
    line = make_trace(TraceOptions(STDLIB, file, "demo", prompts * n, LONGEST_PROMPT, longest, seed=0))
    cases = read_trace(file)
    cases = [dataclasses.replace(case, prompt=cases[case.number - case.number % n].prompt) for case in cases]
    write_cases(file, cases, with_ids=False)
    return line


def measure(trace: Path, output: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Runs one rollout; returns its main figures.  A failure ends the program with the rollout's last lines."""
    arguments = ["rollout", "--trace", str(trace), "--out", str(output), "--fixed-responses", "--verifiers", "2", *flags]
    done = subprocess.run([sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("\n".join(done.stderr.splitlines()[-5:]))
    report = json.loads((output / "step0" / "round0" / "report.json").read_text(encoding="utf-8"))
    names = ("requests", "tokens", "wall_s", "tokens_per_s", "teacher_forced_acceptance_length")
    return {name: report[name] for name in names} | {"behind_s": report["straggler"]["behind_the_others_s"]}


def markdown(result: Mapping[str, Any]) -> str:
    """The results as a Markdown page: medians over rounds (minimum to maximum); speed-ups are ratios within a round."""
    rounds: list[dict[str, dict[str, Any]]] = result["rounds"]
    head = ("way", "wall time, s", "tokens/s", "times as fast as native", "acceptance length", "straggler behind, s")
    body = []
    for way in WAYS:
        mine = [each[way] for each in rounds]
        faster = [each["native"]["wall_s"] / each[way]["wall_s"] for each in rounds]
        lengths = [each["teacher_forced_acceptance_length"] or 1.0 for each in mine]
        wall_s, speed, behind_s = ([each[name] for each in mine] for name in ("wall_s", "tokens_per_s", "behind_s"))
        cells = (wall_s, 1), (speed, 0), (faster, 2), (lengths, 2), (behind_s, 1)
        body.append([way, *(spread(values, digits) for values, digits in cells)])
    about = result["about"]
    first = rounds[0]["native"]
    line = f"{first['requests']} fixed responses, {first['tokens']} tokens; {len(rounds)} rounds: medians (least to most)."
    return "\n".join(
        ["# Rollouts", "", f"Commit `{about['commit']}`: `{about['command']}`", "", line, "", *table(head, body), ""]
    )


def main(arguments: Sequence[str]) -> None:
    """Measures all rounds; writes the results after each."""
    given, flags = _parser().parse_known_args(list(arguments))
    trace = given.output / "train.0.parquet"
    print(prepare(trace, given.prompts, given.n, given.longest), flush=True)
    rounds: list[dict[str, dict[str, Any]]] = []
    about = hardware.about(["python", "-m", "backend.lab.experiments.rollouts", *arguments], sorted(os.sched_getaffinity(0)))
    for number in range(given.rounds):
        found = {}
        for way in [*WAYS][number % len(WAYS) :] + [*WAYS][: number % len(WAYS)]:
            found[way] = measure(trace, given.output / f"{way}-{number}", [*WAYS[way], *flags])
            print(f"round {number}, {way}: {json.dumps(found[way])}", flush=True)
        rounds.append(found)
        result = {"about": about, "rounds": rounds}
        (given.output / "rollouts.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (given.output / "rollouts.md").write_text(markdown(result), encoding="utf-8")
    print(markdown(result), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-rollouts", description="One batch, natively and disaggregated.", allow_abbrev=False
    )
    say = parser.add_argument
    say("--output", type=Path, required=True, metavar="DIR", help="where the trace, all results and rollouts.md go")
    say("--prompts", type=int, default=128, help="default: 128")
    say("--n", type=int, default=4, help="responses to each (default: 4)")
    say("--longest", type=int, default=2000, help=f"tokens of a response, from {SHORTEST} on (default: 2000)")
    say("--rounds", type=int, default=3, help="of each way (default: 3)")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
