"""The campaign's findings as JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from backend.lab.bench.hardware import commit
from tests.chaos.campaign import Result


def write(directory: Path, result: Result, command: str) -> str:
    """Writes `chaos.json` into `directory`; returns its text."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"command": command, "commit": commit(), **_faults(result)}
    text = json.dumps(document, indent=1) + "\n"
    (directory / "chaos.json").write_text(text)
    return text


def _faults(result: Result) -> dict[str, Any]:
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
