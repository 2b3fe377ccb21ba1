"""Makes traces of Python source code, for demonstrations and benchmarks.  The command's process."""

import random
from argparse import Namespace
from itertools import islice
from pathlib import Path

from backend.models.demo import TARGET_DIR
from backend.models.resolve import check_target, find
from backend.rollout.corpus import load_corpus
from backend.rollout.requests import Tokenizer
from backend.rollout.trace import Case, TraceError, write_cases

STDLIB = Path("stdlib")
SHORTEST = 16
"""Tokens of a prompt or a response at least."""


def make_trace(options: Namespace) -> str:
    """Writes the trace and returns a line that describes it.  Raises `TraceError`, `ModelError`."""
    target = find("--model", options.model, TARGET_DIR, lambda line: None)
    check_target(target)
    tokenizer = Tokenizer(str(target))
    chance = random.Random(options.seed)
    if options.source == STDLIB:
        documents = list(load_corpus().train)
    elif options.source.is_dir():
        corpus = load_corpus(options.source)
        documents = [*corpus.train, *corpus.validation]
    else:
        raise TraceError(f"{options.source}: no such directory")
    chance.shuffle(documents)
    found = (pair for document in documents if (pair := cut(document.text, tokenizer, options, chance)))
    pairs = list(islice(found, options.limit))
    if not pairs:
        raise TraceError(f"{options.source}: no file gave a pair of a prompt and a response of {SHORTEST} tokens each")
    cases = [Case(number, pairs[number - number % options.samples][0], gen) for number, (_, gen) in enumerate(pairs)]
    lengths = sorted(len(tokenizer.encode_response(case.gen)) for case in cases)
    try:
        write_cases(options.out, cases, with_ids=False)
    except OSError as error:
        raise TraceError(f"--out {options.out}: {error.strerror}") from error
    return f"{options.out}: {len(cases)} rows, responses of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths)} in all"


def cut(text: str, tokenizer: Tokenizer, options: Namespace, chance: random.Random) -> tuple[str, str] | None:
    """Cuts a prompt and its response out of a text; they begin anywhere in its first half.  None if the text is too short.

    Lengths are drawn uniformly on a logarithmic scale: few long responses among many short ones.  The text is cut between
    tokens, but a rollout tokenizes both parts again.  So a pair whose response would then be too long or short is left out.
    """
    tokens = tokenizer.encode_response(text[chance.randrange(1 + len(text) // 2) :])
    middle = _draw(chance, options.max_prompt)
    end = middle + _draw(chance, options.max_gen)
    prompt, gen = tokenizer.decode(tokens[:middle]), tokenizer.decode(tokens[middle:end])
    fits = SHORTEST <= len(tokenizer.encode_response(gen)) <= options.max_gen
    return (prompt, gen) if prompt and fits and end <= len(tokens) else None


def _draw(chance: random.Random, most: int) -> int:
    drawn: float = SHORTEST * (most / SHORTEST) ** chance.random()
    return min(most, round(drawn))
