"""Writes bench.json, bench.md and bench.png.  Parent process; pure except for `write` and `keep`."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from backend.config.sources import Say
from backend.lab.bench import plot
from backend.lab.bench.measure import PLAIN, Results, Row, compared, differences, ratios
from backend.lab.bench.options import AUTO_LEARNS, PROBABILISTIC, WARM_UP_TOKENS
from backend.records.markdown import table
from backend.records.store import appearing

NATIVES = ("native", PROBABILISTIC)
NOTHING = "-"
Columns = Mapping[str, Callable[[Row], str]]
"""The cells of a row's line in a table, by the columns' heads."""


def write(output: Path, results: Results, say: Say) -> None:
    content = keep(output, results)
    rows = results.rows()
    (output / "bench.md").write_text(markdown(content, rows), encoding="utf-8")
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
    pace = {"pace": asdict(options.pace) if options.pace else None}
    return {
        **results.about,
        "paced": str(options.pace) if options.pace else None,
        "settings": vars(options) | pace | {"cores_verifier": split.verifier, "cores_drafter": split.drafter},
        "complete": results.complete,
        "targets": results.targets,
        "rows": [row.document(len(split.verifier)) for row in results.rows()],
        "greedy_identical": not unlike if count else None,
        "greedy_compared": count,
        "greedy_differences": unlike,
    }


def markdown(content: Mapping[str, Any], rows: Sequence[Row]) -> str:
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
    paced = f"Paced on this machine's CPU, with the arithmetic of a smaller model: {content['paced']}."
    note = ["", paced] if content["paced"] else []
    for target in dict.fromkeys(row.target for row in rows):
        own = [row for row in rows if row.target == target]
        lines += [f"## Target {target}", "", _describe(content["targets"][target]), ""]
        points = list(dict.fromkeys(row.point for row in own))
        by_point = sorted(own, key=lambda row: points.index(row.point))
        lines += _section("Throughput: equal verifier, per busy core", _throughput(by_point), by_point, note)
        lines += _section("What a step is made of", CYCLES, [row for row in own if row.values("cycle_ms")], note)
        lines += _section("Per request, and where the time goes", LATENCY, by_point, note)
    if content["greedy_differences"]:
        lines += ["## Greedy differences", "", *(f"- {each}" for each in content["greedy_differences"])]
    return "\n".join(lines) + "\n"


def _greedy_line(content: Mapping[str, Any]) -> str:
    identical, compared = content["greedy_identical"], content["greedy_compared"]
    if identical is None:
        return "Greedy answers: nothing to compare"
    verdict = "all identical" if identical else f"{len(content['greedy_differences'])} measurements differ (see the end)"
    return f"{compared} greedy answers compared with plain decoding's: {verdict}"


def number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def spread(values: Sequence[float], digits: int) -> str:
    """The median, with the least and the greatest value if these differ."""
    if not values:
        return NOTHING
    middle, least, greatest = (number(each(values), digits) for each in (median, min, max))
    return middle if least == greatest else f"{middle} ({least}-{greatest})"


def _spread(name: str, digits: int) -> Callable[[Row], str]:
    """The cell of a figure: its median, with least and greatest where they differ."""
    return lambda row: spread(row.values(name), digits)


def _median(name: str, digits: int) -> Callable[[Row], str]:
    return lambda row: number(row.median(name), digits)


def _percent(name: str, digits: int = 0) -> Callable[[Row], str]:
    """The cell of a share: its median."""
    return lambda row: NOTHING if (share := row.median(name)) is None else f"{share:.{digits}%}"


_WHAT: Columns = {"point": lambda row: row.point.name, "mode": lambda row: row.label}
CYCLES: Columns = {
    **_WHAT,
    "cycle ms": _median("cycle_ms", 2),
    "= paced": _median("paced_ms", 2),
    "+ overrun": _median("overrun_ms", 2),
    "+ awaiting drafts": _median("awaiting_ms", 2),
    "+ overhead": _median("overhead_ms", 2),
    "steps overrun": _percent("overrun_share"),
    "draft passes overrun": _percent("pass_overrun_share"),
    "by ms / pass": _median("pass_overrun_ms", 3),
}
"""The parts of a paced target step's time."""
LATENCY: Columns = {
    **_WHAT,
    "TGS": _spread("tgs", 0),
    "TTFT ms": _spread("ttft_ms", 0),
    "acceptance length": _spread("acceptance_length", 2),
    "drafted": _percent("drafted_share"),
    "awaiting drafts": _percent("idle_awaiting_draft", 1),
    "hit rate": _percent("hit_rate"),
    "T_draft ms": _median("t_draft_ms", 2),
    "T_verify ms": _median("t_verify_ms", 2),
}


def _section(title: str, columns: Columns, rows: Sequence[Row], note: Sequence[str]) -> list[str]:
    if not rows:
        return []
    body = [[cell(row) for cell in columns.values()] for row in rows]
    return [f"### {title}", *note, *table(list(columns), body), ""]


def _throughput(rows: Sequence[Row]) -> Columns:
    """Throughput with an equal verifier and per busy core; relative to the best of other modes, with this K if measured."""

    def over(row: Row, modes: Sequence[str], name: str = "tokens_per_s") -> str:
        bases = [each for each in rows if each.point == row.point and each.configuration.mode in modes]
        alike = [each for each in bases if each.configuration.k == row.configuration.k] or bases
        return spread(ratios(row, max(alike, key=lambda each: median(each.values("tokens_per_s")), default=None), name), 2)

    return {
        **_WHAT,
        "tok/s": _spread("tokens_per_s", 0),
        "x off": lambda row: over(row, [PLAIN]),
        "x best native": lambda row: over(row, NATIVES),
        "x off, per busy core": lambda row: over(row, [PLAIN], "tokens_per_busy_core_s"),
    }


def _describe(target: Mapping[str, Any]) -> str:
    return (
        f"{target['parameters'] / 1e6:.1f} M parameters, {target.get('num_hidden_layers', '?')} layers, "
        f"width {target.get('hidden_size', '?')}, MLP {target.get('intermediate_size', '?')}."
    )


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)
