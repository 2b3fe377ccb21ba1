"""Writes bench.json, bench.md and bench.png.  Parent process; pure except for `write` and `keep`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from backend.config.sources import Say
from backend.lab.bench import plot
from backend.lab.bench.markdown import NOTHING, number, spread, table
from backend.lab.bench.measure import PLAIN, Difference, Results, Row, compared, differences, limit, ratios, step_times
from backend.lab.bench.options import AUTO_LEARNS, PROBABILISTIC, WARM_UP_TOKENS
from backend.lab.bench.pace import Cost
from backend.lab.bench.plan import Point
from backend.records.store import appearing

NATIVES = ("native", PROBABILISTIC)
SHOWN_DIFFERENCES = 20
Columns = Mapping[str, Callable[[Row], str]]
"""The cells of a row's line in a table, by the columns' heads."""


def write(output: Path, results: Results, say: Say) -> None:
    content = keep(output, results)
    rows = results.rows()
    (output / "bench.md").write_text(markdown(content, rows, differences(results.greedy)), encoding="utf-8")
    drawn = plot.draw(rows, output / "bench.png", say, content["paced"])
    say(f"wrote {output}/bench.json, bench.md{', bench.png' if drawn else ''}")


def keep(output: Path, results: Results) -> dict[str, Any]:
    """Replaces bench.json atomically, so that a run that is killed leaves its results; returns the content."""
    content = document(results)
    with appearing(output / "bench.json") as unfinished:
        unfinished.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return content


def document(results: Results) -> dict[str, Any]:
    options, split, unlike, count = results.options, results.split, differences(results.greedy), compared(results.greedy)
    return {
        **results.about,
        "paced": str(options.pace) if options.pace else None,
        "settings": asdict(options) | {"cores_verifier": split.verifier, "cores_drafter": split.drafter},
        "complete": results.complete,
        "targets": results.targets,
        "rows": msgspec.to_builtins(results.rows()),
        "greedy_identical": not unlike if count else None,
        "greedy_compared": count,
        "greedy_differences": msgspec.to_builtins(unlike),
    }


def find(rows: Iterable[Row], target: str, point: Point, mode: str, k: int | None = None) -> Row | None:
    """The row of a mode, with this K if there is one."""
    found = [r for r in rows if (r.target, r.mode, r.point) == (target, mode, point)]
    return next((r for r in found if r.k == k), found[0] if found else None)


def markdown(content: Mapping[str, Any], rows: Sequence[Row], differences: Sequence[Difference]) -> str:
    hardware = content["hardware"]
    settings = content["settings"]
    lines = [
        f"# Benchmark of {content['commit']}",
        "",
        f"- Command: `{content['command']}`, {content['date']}" + ("" if content["complete"] else ", **interrupted**"),
        f"- Hardware: {hardware['cpu']}, verifier on cores {_list(settings['cores_verifier'])}, drafter on "
        f"{_list(settings['cores_drafter'])}, {hardware['memory_gib']} GiB; GPUs: {_list(hardware['gpus']) or 'none'}; "
        f"load average before: {hardware['load_average_before']}",
        f"- Versions: Python {hardware['python']}, {_list(f'{n} {v}' for n, v in hardware['versions'].items())}",
        f"- Alternating rounds: {settings['rounds']}; tokens: {settings['prompt_tokens']} in, {settings['tokens']} out; "
        "medians with (least-greatest)",
        f"- Before: {settings['warm_ups']} loads of up to {WARM_UP_TOKENS} tokens per concurrency and temperature, "
        f"{AUTO_LEARNS} times as many for `auto`, which learns from them what steps take and what drafts are worth",
        f"- {_greedy_line(content)}",
        "",
    ]
    for target in dict.fromkeys(row.target for row in rows):
        own = [row for row in rows if row.target == target]
        lines += [f"## Target {target}", "", _describe(content["targets"][target]), ""]
        points = list(dict.fromkeys(row.point for row in own))
        by_point = sorted(own, key=lambda row: points.index(row.point))
        for section in (
            _throughput(by_point, _limits(own, settings["pace"])),
            _section("What a step is made of", CYCLES, [row for row in own if row.paced]),
            _section("Per request, and where the time goes", LATENCY, by_point),
        ):
            lines += _noted(section, content["paced"])
    if differences:
        lines += _differences(differences)
    return "\n".join(lines) + "\n"


def _noted(section: Sequence[str], paced: str | None) -> list[str]:
    """The section; for a paced run, with a line below its title that names the pace."""
    if not section or not paced:
        return list(section)
    return [section[0], "", f"Paced on this machine's CPU, with the arithmetic of a smaller model: {paced}.", *section[1:]]


def _greedy_line(content: Mapping[str, Any]) -> str:
    identical, compared = content["greedy_identical"], content["greedy_compared"]
    if identical is None:
        return "Greedy answers: nothing to compare"
    verdict = "all identical" if identical else f"{len(content['greedy_differences'])} measurements differ (see the end)"
    return f"{compared} greedy answers compared with plain decoding's: {verdict}"


def _spread(name: str, digits: int) -> Callable[[Row], str]:
    """The cell of a figure: its median, with least and greatest where they differ."""

    def cell(row: Row) -> str:
        limits = row.spread[name]
        return NOTHING if limits is None else spread([getattr(row, name), *limits], digits)

    return cell


_WHAT: Columns = {"point": lambda row: row.point.name, "mode": lambda row: row.label}
CYCLES: Columns = {
    **_WHAT,
    "cycle ms": lambda row: number(row.paced["cycle_ms"], 2),
    "= paced": lambda row: number(row.paced["paced_ms"], 2),
    "+ overrun": lambda row: number(row.paced["overrun_ms"], 2),
    "+ awaiting drafts": lambda row: number(row.paced["awaiting_ms"], 2),
    "+ overhead": lambda row: number(row.paced["overhead_ms"], 2),
    "steps overrun": lambda row: f"{row.paced['overrun_share']:.0%}",
    "idle awaiting drafts": lambda row: f"{row.idle_awaiting_draft:.1%}",
    "draft passes overrun": lambda row: _percent(row.paced.get("pass_overrun_share")),
    "by ms / pass": lambda row: number(row.paced.get("pass_overrun_ms"), 3),
}
"""The parts of a paced target step's time."""
LATENCY: Columns = {
    **_WHAT,
    "TGS": _spread("tgs", 0),
    "TTFT ms": _spread("ttft_ms", 0),
    "acceptance length": _spread("acceptance_length", 2),
    "drafted": lambda row: f"{row.drafted_share:.0%}",
    "awaiting drafts": lambda row: f"{row.idle_awaiting_draft:.1%}",
    "hit rate": lambda row: _percent(row.hit_rate),
    "T_draft ms": lambda row: number(row.t_draft_ms, 2),
    "T_verify ms": lambda row: number(row.t_verify_ms, 2),
    "bytes / round": lambda row: number(row.bytes_per_round, 0),
    "busy + idle": lambda row: f"{row.accounted:.1%}",
}


def _section(title: str, columns: Columns, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    body = [[cell(row) for cell in columns.values()] for row in rows]
    return [f"### {title}", "", *table(list(columns), body), ""]


def _throughput(rows: Sequence[Row], limits: Mapping[Point, float]) -> list[str]:
    """Throughput with an equal verifier, and per busy core."""
    columns = {**_WHAT, "tok/s": _spread("tokens_per_s", 0)}
    relative = ["x off", "x best native", "x off, per busy core", "limit, x off"]
    body = [[*(cell(row) for cell in columns.values()), *_ratios(rows, row), number(limits.get(row.point), 2)] for row in rows]
    return ["### Throughput: equal verifier, per busy core", "", *table([*columns, *relative], body), ""]


def _limits(rows: Sequence[Row], pace: Mapping[str, Any] | None) -> dict[Point, float]:
    """By point, what the best measured acceptance would bring (`limit.py`): that of `native`, which verifies whole drafts."""
    # `native` drafts within its steps.
    steps = ((row.step_tokens, row.step_ms / 1e3) for row in rows if row.mode not in NATIVES)
    step_s = Cost(**pace["target"]).seconds if pace else step_times(steps)
    found: dict[Point, float] = {}
    for point in dict.fromkeys(row.point for row in rows if step_s is not None):
        drafted = [row for row in rows if row.point == point and row.accepted_shares]
        best = max(drafted, key=lambda row: (row.mode in NATIVES, sum(row.accepted_shares)), default=None)
        if best is not None and step_s is not None:
            found[point] = limit(point.concurrency, best.accepted_shares, step_s)
    return found


def _ratios(rows: Sequence[Row], row: Row) -> list[str]:
    def over(modes: Sequence[str], name: str = "tokens_per_s") -> str:
        found = [base for mode in modes if (base := find(rows, row.target, row.point, mode, row.k)) is not None]
        return spread(ratios(row, max(found, key=lambda base: base.tokens_per_s, default=None), name), 2)

    return [over([PLAIN]), over(NATIVES), over([PLAIN], "tokens_per_busy_core_s")]


def _differences(differences: Sequence[Difference]) -> list[str]:
    body = [[str(value) for value in msgspec.structs.astuple(each)] for each in differences[:SHOWN_DIFFERENCES]]
    more = len(differences) - len(body)
    note = [f"and {more} more, in bench.json", ""] if more else []
    return ["## Greedy differences", "", *table(Difference.__struct_fields__, body), "", *note]


def _describe(target: Mapping[str, Any]) -> str:
    return (
        f"{target['parameters'] / 1e6:.1f} M parameters, {target.get('num_hidden_layers', '?')} layers, "
        f"width {target.get('hidden_size', '?')}, MLP {target.get('intermediate_size', '?')}."
    )


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)
