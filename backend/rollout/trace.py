"""Reads and writes traces: parquet files of prompts and responses.  Also reads files of prompts alone.  The command's process.

A trace is `train.{S}.parquet` with string columns `prompt` and `gen`; S is the training step that it comes from.  A rollout
writes its generated cases in this form too, with a column `id` in front, so that they can be replayed.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from backend.config.sources import ConfigError
from backend.records.store import appearing

COLUMNS = ("prompt", "gen")
STEP_IN_NAME = re.compile(r"\.(\d+)\.parquet$")
STEP_FIELD = "{S}"
SHOWN_CHARACTERS = 40


class TraceError(ConfigError):
    """A trace cannot be used; the message is one line that names the file and the row."""


@dataclass(frozen=True)
class Case:
    """One prompt and its response."""

    number: int
    """Its row in the trace, from 0: the `req_id` of every table."""
    prompt: str
    gen: str
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of this prompt alone, by vLLM's names."""


def trace_file(given: str, step: int | None) -> tuple[Path, int]:
    """The file that `--trace` names, with `{S}` replaced by the step; and the step: `step`, else from the name, else 0."""
    if STEP_FIELD in given:
        if step is None:
            raise TraceError(f"--trace {given}: {STEP_FIELD} stands for a step: give --step")
        return Path(given.replace(STEP_FIELD, str(step))), step
    found = STEP_IN_NAME.search(given)
    return Path(given), step if step is not None else int(found[1]) if found else 0


def read_trace(file: Path) -> list[Case]:
    """Every row of a trace.  Raises `TraceError`."""
    columns = _columns(file, COLUMNS)
    cases = []
    for number, (prompt, gen) in enumerate(zip(*columns, strict=True)):
        for name, value in zip(COLUMNS, (prompt, gen), strict=True):
            if value is None:
                raise TraceError(f"{file}: row {number}: no {name}")
        cases.append(Case(number, prompt, gen))
    if not cases:
        raise TraceError(f"{file}: the trace is empty")
    return cases


def read_prompts(file: Path) -> list[Case]:
    """Cases without a response: the column `prompt` of a parquet file; `prompt` and `sampling_params` of JSON Lines.

    Raises `TraceError`.
    """
    if file.suffix == ".parquet":
        rows = [{"prompt": prompt} for prompt in _columns(file, ("prompt",))[0]]
    else:
        rows = read_json_lines(file)
    cases = []
    for number, row in enumerate(rows):
        prompt, sampling = row.get("prompt"), row.get("sampling_params", {})
        if not isinstance(prompt, str):
            raise TraceError(f"{file}: row {number}: no prompt")
        if not isinstance(sampling, dict):
            raise TraceError(f"{file}: row {number}: sampling_params is not a JSON object")
        cases.append(Case(number, prompt, "", sampling))
    if not cases:
        raise TraceError(f"{file}: no prompts in it")
    return cases


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file.  Raises `TraceError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not UTF-8 text") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` would also split at U+2028 in a string.
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{file}: line {number}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise TraceError(f"{file}: line {number}: not a JSON object")
        found.append(value)
    return found


def match(prompts: Sequence[Case], cases: Sequence[Case], prompts_file: Path, trace: Path) -> list[Case]:
    """Every prompt with its response in the trace.  If a prompt is repeated, it takes the trace's rows for it in turn.

    Raises `TraceError` for a prompt that is not in the trace.
    """
    responses: dict[str, list[str]] = {}
    for case in cases:
        responses.setdefault(case.prompt, []).append(case.gen)
    turns = {prompt: cycle(rows) for prompt, rows in responses.items()}
    for case in prompts:
        if case.prompt not in turns:
            raise TraceError(f"{prompts_file}: row {case.number}: {trace} has no row with the prompt {shown(case.prompt)}")
    return [replace(case, gen=next(turns[case.prompt])) for case in prompts]


def write_cases(file: Path, cases: Sequence[Case], with_ids: bool = True) -> None:
    """Writes cases as parquet; the file appears only when it is complete."""
    columns: dict[str, pa.Array] = {"id": pa.array([case.number for case in cases], pa.int64())} if with_ids else {}
    columns |= {name: pa.array([getattr(case, name) for case in cases], pa.string()) for name in COLUMNS}
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing(file) as partial:
        pq.write_table(pa.table(columns), partial)


def shown(text: str) -> str:
    """The beginning of a text, for a message."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "...")


def _columns(file: Path, names: Sequence[str]) -> list[list[Any]]:
    if not file.is_file():
        raise TraceError(f"{file}: no such file")
    try:
        schema = pq.read_schema(file)
        for name in names:
            if name not in schema.names:
                raise TraceError(f"{file}: no column {name!r}; it has {', '.join(schema.names) or 'none'}")
            if schema.names.count(name) > 1:
                raise TraceError(f"{file}: several columns {name!r}")
            kind = schema.field(name).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise TraceError(f"{file}: column {name!r} holds {kind}, not strings")
        table = pq.read_table(file, columns=list(names))
        return [table.column(name).to_pylist() for name in names]
    except UnicodeDecodeError as error:
        raise TraceError(f"{file}: not UTF-8 text") from error
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{file}: not a parquet file: {' '.join(str(error).split())[:200]}") from error
