"""The command line's output: progress lines, the fleet table, the settings with their sources.  The launcher's process."""

import json
import time
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from backend.config import Settings
from backend.config.sources import DEFAULT, SECRETS, Loaded, Say, leaves
from backend.fleet import FleetSnapshot, MemberView
from backend.models.resolve import ResolvedModels
from gateway.cli.preflight import here

SHOWN_OPERATIONS = 5


def progress() -> Say:
    """A function that prints lines of progress with the seconds since now: one line, or several with equal indentation."""
    began = time.monotonic()

    def say(line: str) -> None:
        first, *rest = line.splitlines() or [""]
        print(f"{time.monotonic() - began:7.1f} s  {first}", flush=True)
        for each in rest:
            print(f"{'':11}{each}", flush=True)

    return say


def plan_line(settings: Settings, models: ResolvedModels) -> str:
    """What is about to be started, in one line."""
    verifiers = f"{settings.verifiers} verifier{'' if settings.verifiers == 1 else 's'}"
    how = {"off": "plain decoding", "native": f"vLLM's own drafting ({models.drafter_kind})"}.get(settings.mode)
    if how is None:
        drafters = f"{settings.drafters} drafter{'' if settings.drafters == 1 else 's'}"
        kinds = ", ".join(each.kind for each in models.in_turn) or models.drafter_kind
        how = f"{drafters} ({kinds}), up to {settings.num_speculative_tokens} tokens per draft"
    learns = "" if models.learning_dir is None else "; drafters learn from live traffic"
    return f"model {models.name}: {verifiers}, {how}{learns}"


def ready(url: str, settings: Settings, models: ResolvedModels) -> str:
    """The URL, with a command to paste into a shell."""
    base = here(url)
    name = (settings.gateway.served_model_name or [models.name])[0]
    body: dict[str, Any]
    if models.name != "demo" and _has_chat_template(settings, Path(models.target_dir)):
        path, body = "chat/completions", {"model": name, "messages": [{"role": "user", "content": "Hello!"}]}
    else:
        path, body = "completions", {"model": name, "prompt": "def read_lines(path):\n    ", "max_tokens": 64}
    key = " -H 'Authorization: Bearer API-KEY'" if settings.gateway.api_key else ""
    data = json.dumps({**body, "stream": True})
    command = f"curl -N {base}/v1/{path}{key} -H 'Content-Type: application/json' -d '{data}'"
    return f"serving at {url}/v1 - try:\n{command}\nthe fleet is at {base}/ - Ctrl-C stops everything"


def _has_chat_template(settings: Settings, directory: Path) -> bool:
    if settings.gateway.chat_template or any(directory.glob("chat_template.*")):
        return True
    try:
        return "chat_template" in json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def settings_yaml(loaded: Loaded) -> str:
    """The settings in force as YAML, every line with the source of its value."""
    lines: list[tuple[str, str]] = []
    section: tuple[str, ...] = ()
    for path, _ in leaves():
        if path[:-1] != section:
            section = path[:-1]
            lines.append((f"{section[-1]}:", ""))
        value: Any = reduce(getattr, path, loaded.settings)
        if path in SECRETS and value is not None:
            value = "***"
        text = f"{path[-1]}: {yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]}"
        lines.append(("  " * len(section) + text, loaded.origins.get(path, DEFAULT)))
    width = max(len(text) for text, _ in lines) + 2
    return "\n".join(f"{text:<{width}}# {origin}" if origin else text for text, origin in lines)


def table(snapshot: FleetSnapshot) -> str:
    """A text table with a row per member, then pins, operations and the coordinator's counters."""
    rows = [("MEMBER", "STATE", "PID", "NODE", "HEARD", "WORK", "DETAIL")]
    for view in snapshot.members:
        member = view.member
        heard = f"{view.last_report_s:.1f} s"
        work, detail = _work(view, snapshot)
        moving = " (moving)" if view.drain is not None and view.drain.migrate and member.kind == "verifier" else ""
        rows.append((member.id, member.state + moving, str(member.pid), member.node[:15], heard, work, detail))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counters = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in snapshot.counters.items())
    pins = [f"pinned: {drafter} to {' '.join(verifiers) or 'nobody'}" for drafter, verifiers in sorted(snapshot.pins.items())]
    operations = [
        f"operation {each.id}: {each.kind} {' '.join(each.members)}".rstrip()
        + f", {each.state}"
        + (each.note and f": {each.note}")
        for each in snapshot.operations[-SHOWN_OPERATIONS:]
    ]
    return "\n".join([*text, "", *pins, *operations, f"fleet version {snapshot.version}", counters])


def _work(view: MemberView, snapshot: FleetSnapshot) -> tuple[str, str]:
    if view.verifier is not None:
        stats = view.verifier
        drafters = [a.drafter_id for a in snapshot.assignments if a.verifier_id == view.member.id]
        detail = f"mode {stats.mode}, KV {stats.kv_usage:.0%}, {stats.tokens} tokens"
        drafts = sum(each.drafts for each in stats.drafters.values())
        accepted = sum(each.accepted_tokens for each in stats.drafters.values())
        detail += f", acceptance length {1 + accepted / drafts:.2f}" if drafts else ""
        detail += f", drafters {' '.join(drafters)}" if drafters else ""
        down = f" (down: {' '.join(stats.drafters_down)})" if stats.drafters_down else ""
        return f"{stats.running} running, {stats.waiting} waiting", detail + down
    if view.drafter is not None:
        drafter = view.drafter
        detail = f"{drafter.draft_tokens} tokens drafted, cache {drafter.cache_usage:.0%}"
        if (learning := drafter.learning) is not None:
            detail += f", head version {learning.version}{_right(learning.live_acceptance)}"
            if learning.previous_acceptance is not None and learning.previous_version != learning.version:
                detail += f", before it version {learning.previous_version}{_right(learning.previous_acceptance)}"
            detail += f", {learning.steps} steps of training"
        return f"{drafter.sequences} sequences", detail
    return "", ""


def _right(acceptance: float | None) -> str:
    """The share of a head's drafts whose first token was right, in words."""
    return "" if acceptance is None else f" ({acceptance:.0%} right)"
