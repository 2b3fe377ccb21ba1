"""Writes bench.json, bench.md and bench.png.  Parent process; pure except for `write` and `keep`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from backend.fleet import CHANCE_BINS
from backend.lab.bench import plot
from backend.lab.bench.identical import PLAIN, Difference
from backend.lab.bench.measure import Ratio, Row, ceiling, ratio, together
from backend.lab.bench.options import AUTO_LEARNS, PROBABILISTIC, Options
from backend.lab.bench.plan import LOCAL_MODES, CoreSplit, Point
from backend.lab.bench.run import WARM_UP_TOKENS, Results
from backend.models.resolve import Say

EQUAL_VERIFIER, EQUAL_TOTAL = "equal_verifier", "equal_total"
NATIVES = ("native", PROBABILISTIC)
SHOWN_DIFFERENCES = 20
NOTHING = "-"


def write(output: Path, about: Mapping[str, Any], options: Options, split: CoreSplit, results: Results, say: Say) -> None:
    content = keep(output, about, options, split, results)
    rows = results.rows()
    (output / "bench.md").write_text(markdown(content, rows, results.greedy.differences()), encoding="utf-8")
    drawn = plot.draw(rows, output / "bench.png", say, content["paced"])
    say(f"wrote {output}/bench.json, bench.md{', bench.png' if drawn else ''}")


def keep(output: Path, about: Mapping[str, Any], options: Options, split: CoreSplit, results: Results) -> dict[str, Any]:
    """Replaces bench.json atomically, so that a run that is killed leaves its results; returns the content."""
    content = document(about, options, split, results)
    unfinished = output / "bench.json.new"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(output / "bench.json")
    return content


def document(about: Mapping[str, Any], options: Options, split: CoreSplit, results: Results) -> dict[str, Any]:
    differences = results.greedy.differences()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    return {
        **about,
        "paced": str(options.pace) if options.pace else None,
        "settings": settings | {"cores_verifier": split.verifier, "cores_drafter": split.drafter},
        "complete": results.complete,
        "targets": results.targets,
        "rows": [msgspec.to_builtins(row) for row in results.rows()],
        "greedy_identical": not differences if results.greedy.compared else None,
        "greedy_compared": results.greedy.compared,
        "greedy_differences": [msgspec.to_builtins(difference) for difference in differences],
    }


def find(rows: Iterable[Row], target: str, layout: str, point: Point, mode: str, k: int | None = None) -> Row | None:
    """The row of a mode, with this K if there is one."""
    found = [r for r in rows if (r.target, r.layout, r.mode, r.point) == (target, layout, mode, point)]
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
        lines += [f"## Target {target}", "", _describe(content["targets"].get(target, {})), ""]
        for section in (_ceilings(own), _throughput(own), _cycles(own), _latency(own), _foretold(own)):
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


def _ceilings(rows: Sequence[Row]) -> list[str]:
    """Times of drafting and verifying, from rows of mode `sync`, and the speed-up that overlap could give."""
    body = [
        [
            row.point.name,
            str(row.k),
            _number(row.t_verify_ms, 2),
            _number(row.t_draft_ms, 2),
            _number(row.t_draft_ms / row.t_verify_ms, 2),
            _number(ceiling(row.t_verify_ms, row.t_draft_ms), 2),
        ]
        for row in rows
        if row.mode == "sync" and row.t_draft_ms and row.t_verify_ms
    ]
    if not body:
        return []
    head = ["point", "K", "T_verify ms", "T_draft ms", "T_draft / T_verify", "ceiling over drafting in turn"]
    return ["### What overlap can bring", "", *_table(head, body), ""]


def _throughput(rows: Sequence[Row]) -> list[str]:
    """Throughput with an equal verifier, with equal total cores, and per busy core."""
    head = [
        "point",
        "mode",
        "tok/s",
        "x off",
        "x best native",
        "x off, all cores",
        "x best native, all cores",
        "x off, per busy core",
    ]
    body = []
    for row in rows:
        if row.layout != EQUAL_VERIFIER and not (row.mode in LOCAL_MODES and row.layout == EQUAL_TOTAL):
            continue
        where = " (all cores)" if row.layout == EQUAL_TOTAL else ""
        body.append([row.point.name, row.label + where, _spread(row, "tokens_per_s", 0), *_ratios(rows, row)])
    body.sort(key=lambda cells: [r.point.name for r in rows].index(cells[0]))
    return ["### Throughput: equal verifier, equal total, per busy core", "", *_table(head, body), ""]


def _ratios(rows: Sequence[Row], row: Row) -> list[str]:
    def over(layout: str, modes: Sequence[str], name: str = "tokens_per_s") -> str:
        found = [base for mode in modes if (base := find(rows, row.target, layout, row.point, mode, row.k)) is not None]
        return _ratio(ratio(row, max(found, key=lambda base: base.tokens_per_s, default=None), name))

    per_core = over(EQUAL_VERIFIER, [PLAIN], "tokens_per_busy_core_s")
    if row.layout == EQUAL_TOTAL:
        return [NOTHING, NOTHING, over(EQUAL_TOTAL, [PLAIN]), over(EQUAL_TOTAL, NATIVES), per_core]
    # A local mode on the verifier's cores alone leaves cores unused: its equal-total figure is its own row.
    whole = [NOTHING] * 2 if row.mode in LOCAL_MODES else [over(EQUAL_TOTAL, [PLAIN]), over(EQUAL_TOTAL, NATIVES)]
    return [over(EQUAL_VERIFIER, [PLAIN]), over(EQUAL_VERIFIER, NATIVES), *whole, per_core]


def _cycles(rows: Sequence[Row]) -> list[str]:
    """The parts of a paced target step's time."""
    head = [
        "point",
        "mode",
        "cycle ms",
        "= paced",
        "+ overrun",
        "+ awaiting drafts",
        "+ overhead",
        "steps overrun",
        "idle awaiting drafts",
        "draft passes overrun",
        "by ms / pass",
    ]
    body = [
        [
            row.point.name,
            row.label + (" (all cores)" if row.layout == EQUAL_TOTAL else ""),
            *(_number(row.paced[f"{name}_ms"], 2) for name in ("cycle", "paced", "overrun", "awaiting", "overhead")),
            f"{row.paced['overrun_share']:.0%}",
            f"{row.idle_awaiting_draft:.1%}",
            f"{row.paced['pass_overrun_share']:.0%}" if "pass_overrun_share" in row.paced else NOTHING,
            _number(row.paced.get("pass_overrun_ms"), 3),
        ]
        for row in rows
        if row.paced
    ]
    return ["### What a step is made of", "", *_table(head, body), ""] if body else []


def _latency(rows: Sequence[Row]) -> list[str]:
    head = [
        "point",
        "mode",
        "TGS",
        "TTFT ms",
        "acceptance length",
        "drafted",
        "awaiting drafts",
        "hit rate",
        "T_verify ms",
        "bytes / round",
        "busy + idle",
    ]
    body = [
        [
            row.point.name,
            row.label + (" (all cores)" if row.layout == EQUAL_TOTAL else ""),
            _spread(row, "tgs", 0),
            _spread(row, "ttft_ms", 0),
            _spread(row, "acceptance_length", 2),
            f"{row.drafted_share:.0%}",
            f"{row.idle_awaiting_draft:.1%}",
            NOTHING if row.hit_rate is None else f"{row.hit_rate:.0%}",
            _number(row.t_verify_ms, 2),
            _number(row.bytes_per_round, 0),
            f"{row.accounted:.1%}",
        ]
        for row in rows
    ]
    body.sort(key=lambda cells: [r.point.name for r in rows].index(cells[0]))
    return ["### Per request, and where the time goes", "", *_table(head, body), ""]


def _foretold(rows: Sequence[Row]) -> list[str]:
    """Predicted chances of draft tokens and observed acceptance, by domain and temperature."""
    groups = dict.fromkeys((row.domain, row.temperature) for row in rows if row.reliability)
    body = []
    for domain, temperature in groups:
        own = together(row.reliability for row in rows if (row.domain, row.temperature) == (domain, temperature))
        for source, found in sorted(own.items()):
            bins = [
                f"{chance / n:.2f}: {right / n:.2f}" if n else NOTHING
                for chance, right, n in zip(found.chances, found.right, found.seen, strict=True)
            ]
            body.append(
                [f"{domain} T={temperature:g}", source, str(sum(found.seen)), f"{found.brier:.3f}", f"{found.error:.3f}", *bins]
            )
    if not body:
        return []
    bounds = [f"{i / CHANCE_BINS:g}-{(i + 1) / CHANCE_BINS:g}" for i in range(CHANCE_BINS)]
    head = ["answers", "drafts", "tokens", "Brier score", "calibration error", *bounds]
    return ["### Chances of draft tokens, predicted: observed", "", *_table(head, body), ""]


def _differences(differences: Sequence[Difference]) -> list[str]:
    head = ["target", "layout", "mode", "point", "round", "request", "position", "expected", "got", "reference"]
    body = [
        [
            d.target,
            d.layout,
            f"{d.mode}-k{d.k}",
            d.point,
            *(str(n) for n in (d.round, d.request, d.position, d.expected, d.got)),
            d.reference,
        ]
        for d in differences[:SHOWN_DIFFERENCES]
    ]
    more = len(differences) - len(body)
    note = [f"and {more} more, in bench.json", ""] if more else []
    return ["## Greedy differences", "", *_table(head, body), "", *note]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _describe(target: Mapping[str, Any]) -> str:
    if not target:
        return ""
    return (
        f"{target['parameters'] / 1e6:.1f} M parameters, {target.get('num_hidden_layers', '?')} layers, "
        f"width {target.get('hidden_size', '?')}, MLP {target.get('intermediate_size', '?')}."
    )


def _ratio(value: Ratio | None) -> str:
    return NOTHING if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _spread(row: Row, name: str, digits: int) -> str:
    value, limits = getattr(row, name), row.spread[name]
    if value is None or limits is None:
        return NOTHING
    least, greatest = (_number(limit, digits) for limit in limits)
    return _number(value, digits) + ("" if least == greatest else f" ({least}-{greatest})")


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(value) for value in values)
