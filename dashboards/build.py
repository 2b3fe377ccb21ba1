"""Writes `grafana/dashboards/*.json` from the modules beside this one: `python -m dashboards.build [--check]`.

The JSON is committed, so that Grafana can use it without this package; `--check` (and a test) tells whether it is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dashboards.detail import ASSIGNMENT, VERIFIERS
from dashboards.model import Dashboard, to_json
from dashboards.overview import OVERVIEW
from dashboards.reliability import RELIABILITY
from dashboards.speculation import SPECULATION

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
ALL = (OVERVIEW, SPECULATION, VERIFIERS, ASSIGNMENT, RELIABILITY)


def text(dashboard: Dashboard) -> str:
    return json.dumps(to_json(dashboard), indent=2, ensure_ascii=False) + "\n"


def outdated() -> list[str]:
    """The names of files that are missing, superfluous, or differ from what this module would write."""
    wanted = {f"{each.uid}.json": text(each) for each in ALL}
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main(arguments: list[str]) -> int:
    """Returns the exit status: 1 when `--check` finds differences, 2 for wrong arguments."""
    if arguments == ["--check"]:
        wrong = outdated()
        for name in wrong:
            print(f"{name} is not what `python -m dashboards.build` writes")
        print(f"{len(ALL)} dashboards" + (f", {len(wrong)} files differ" if wrong else ", all as committed"))
        return 1 if wrong else 0
    if arguments:
        print("usage: python -m dashboards.build [--check]", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for each in ALL:
        (FOLDER / f"{each.uid}.json").write_text(text(each), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
