"""Makes traces from text files, JSON Lines of prompts and responses, or existing traces.  The command's process."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from backend.models.demo import TARGET_DIR
from backend.models.resolve import check_target, find
from backend.rollout.corpus import load_corpus
from backend.rollout.options import TraceOptions
from backend.rollout.requests import Tokenizer
from backend.rollout.trace import Case, TraceError, read_json_lines, read_text, read_trace, write_cases

STDLIB = Path("stdlib")
PAIRS = (("prompt", "gen"), ("prompt", "response"), ("prompt", "completion"))
JSON_LINES = (".jsonl", ".ndjson")
TEXTS = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".go", ".rs", ".java", ".js", ".ts", ".sh")
LONGEST_TEXT = 200_000
"""Characters of one file that are used at most; tokenizing longer files whole would only cost time."""


def make_trace(options: TraceOptions) -> str:
    """Writes the trace and returns a line that describes it.  Raises `TraceError`, `ModelError`."""

    target = find("--model", options.model, TARGET_DIR, lambda line: None)
    check_target(target)
    tokenizer = Tokenizer(str(target))
    chance = random.Random(options.seed)
    cases: list[Case] = []
    for prompt, gen in _pairs(options, tokenizer, chance):
        cases.append(Case(len(cases), prompt, gen))
        if len(cases) == options.limit:
            break
    if not cases:
        raise TraceError(f"{', '.join(map(str, options.sources))}: nothing of --min-prompt + --min-gen tokens in it")
    lengths = sorted(len(tokenizer.response(case.gen)) for case in cases)
    try:
        write_cases(options.out, cases, with_ids=False)
    except OSError as error:
        raise TraceError(f"--out {options.out}: {error.strerror}") from error
    return f"{options.out}: {len(cases)} rows, responses of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths)} in all"


def _pairs(options: TraceOptions, tokenizer: Tokenizer, chance: random.Random) -> Iterator[tuple[str, str]]:
    for source in options.sources:
        for file in _files(source):
            if file.suffix == ".parquet":
                for case in read_trace(file):
                    yield case.prompt, case.gen
            elif file.suffix in JSON_LINES:
                for number, value in enumerate(read_json_lines(file), 1):
                    yield _pair(value, file, number)
            else:
                yield from cut(read_text(file)[:LONGEST_TEXT], tokenizer, options, chance)
        if source == STDLIB and not source.exists():
            documents = list(load_corpus().train)
            chance.shuffle(documents)
            for document in documents:
                # One pair of each file, starting anywhere in its first half.
                begin = chance.randrange(1 + len(document.text) // 2)
                yield from islice(cut(document.text[begin:LONGEST_TEXT], tokenizer, options, chance), 1)


def cut(text: str, tokenizer: Tokenizer, options: TraceOptions, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Cuts a text into consecutive pairs of prompt and response.

    Lengths are drawn uniformly on a logarithmic scale: few long responses among many short ones.  The text is cut between
    tokens, but a rollout tokenizes both parts again.  So a pair whose response would then be too long or short is left out.
    """
    tokens = tokenizer.response(text)
    begin = 0
    while True:
        middle = begin + _draw(chance, options.min_prompt, options.max_prompt)
        end = middle + _draw(chance, options.min_gen, options.max_gen)
        if end > len(tokens):
            return
        prompt, gen = tokenizer.text(tokens[begin:middle]), tokenizer.text(tokens[middle:end])
        if prompt and options.min_gen <= len(tokenizer.response(gen)) <= options.max_gen:
            yield prompt, gen
        begin = end


def _draw(chance: random.Random, least: int, most: int) -> int:
    drawn: float = least * (most / least) ** chance.random()
    return min(most, max(least, round(drawn)))


def _pair(value: dict[str, Any], file: Path, number: int) -> tuple[str, str]:
    for names in PAIRS:
        pair = tuple(value.get(name) for name in names)
        if all(isinstance(each, str) and each for each in pair):
            return str(pair[0]), str(pair[1])
    wanted = " or ".join(sorted({gen for _, gen in PAIRS}))
    raise TraceError(f"{file}: line {number}: no strings prompt and {wanted}; it has {', '.join(value) or 'nothing'}")


def _files(source: Path) -> Sequence[Path]:
    if source.is_dir():
        known = (*TEXTS, *JSON_LINES, ".parquet")
        return sorted(file for file in source.rglob("*") if file.suffix in known and file.is_file())
    if source == STDLIB and not source.exists():
        return []
    return [source]
