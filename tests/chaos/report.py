"""The campaign's findings as Markdown and JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from backend.lab.bench.hardware import commit
from tests.chaos.campaign import Result
from tests.chaos.migration import Moved


def write(directory: Path, result: Result | None, moved: Moved | None, command: str) -> str:
    """Writes `chaos.json` and `chaos.md` into `directory`; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"command": command, "commit": commit(), "faults": _faults(result), "migration": _migration(moved)}
    text = _markdown(document)
    (directory / "chaos.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "chaos.md").write_text(text)
    return text


def _faults(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    kinds: dict[str, Any] = {}
    for kind in sorted({fault.kind for fault in result.faults}):
        mine = [fault for fault in result.faults if fault.kind == kind]
        gaps = [gap for fault in mine for gap in fault.silences]
        back = [fault.back_s for fault in mine if fault.back_s is not None]
        kinds[kind] = {
            "times": len(mine),
            "streams running": len(gaps),
            "median silence s": round(statistics.median(gaps), 3) if gaps else None,
            "longest silence s": round(max(gaps), 3) if gaps else None,
            "back in service s": round(statistics.median(back), 1) if back else None,
        }
    outcomes = result.outcomes
    return {
        "mode": result.mode,
        "seed": result.seed,
        "seconds": round(result.seconds, 1),
        "faults": len(result.faults),
        "kinds": kinds,
        "requests": len(outcomes),
        "requests by kind": dict(sorted(Counter(each.case.name for each in outcomes).items())),
        "left by their clients": sum(each.abandoned for each in outcomes),
        "nowhere to go": sum(each.nowhere_to_go for each in outcomes),
        "metrics": result.metrics,
        "problems": result.problems,
    }


def _migration(moved: Moved | None) -> dict[str, Any] | None:
    if moved is None:
        return None
    return {
        "requests": moved.requests,
        "sequences moved": moved.sequences_moved,
        "share of right draft tokens": {
            "left alone": round(moved.alone, 3),
            "moved": round(moved.moved, 3),
            "moved, up to the cut": round(moved.before, 3),
            "moved, after the cut": round(moved.after, 3),
        },
        "mean time without tokens s": round(moved.recovery_s, 3),
        "seconds": round(moved.seconds, 1),
        "problems": moved.problems,
    }


def _markdown(document: dict[str, Any]) -> str:
    lines = ["# Chaos campaign", "", f"`{document['command']}` at commit {document['commit']}.", ""]
    faults, migration = document["faults"], document["migration"]
    if faults is not None:
        failovers = faults["metrics"].get("outrider_failovers_total", 0)
        lines += [
            f"{faults['faults']} faults in {faults['seconds']:.0f} s under {faults['requests']} requests "
            f"(mode {faults['mode']}, seed {faults['seed']}). {faults['left by their clients']} requests were left by their "
            f"clients, {faults['nowhere to go']} had nowhere to go. Failovers: {failovers:g}.",
            "",
            "| fault | times | streams running | median silence, s | longest silence, s | back in service after, s |",
            "|---|---|---|---|---|---|",
        ]
        for kind, row in faults["kinds"].items():
            cells = ["" if value is None else str(value) for value in row.values()]
            lines.append("| " + " | ".join([kind, *cells]) + " |")
        lines += ["", *_problems(faults["problems"])]
    if migration is not None:
        shares = migration["share of right draft tokens"]
        lines += [
            f"{migration['requests']} requests ({migration['sequences moved']} sequences) moved in their midst, "
            f"{migration['mean time without tokens s']} s without tokens on average. Right draft tokens: {shares['moved']} "
            f"({shares['moved, up to the cut']} up to the cut, {shares['moved, after the cut']} after it), left alone "
            f"{shares['left alone']}.",
            "",
            *_problems(migration["problems"]),
        ]
    return "\n".join(lines)


def _problems(problems: list[str]) -> list[str]:
    return [*(f"- PROBLEM: {each}" for each in problems), ""] if problems else ["No problem found.", ""]
