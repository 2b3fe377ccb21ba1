"""Makes requests of cases: tokenizes them, and checks everything that can be checked before a run.  The command's process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.models.head_config import read_config, text_config
from backend.rollout.trace import Case, TraceError, shown

DEFAULT_TOKENS = 1024
"""Longest free response in tokens, unless `--max-tokens` sets another."""


@dataclass(frozen=True)
class Request:
    """One response to a prompt."""

    number: int
    """Its `req_id`: the row in the trace times the responses per prompt, plus the response's index for that prompt."""
    case: Case
    prompt: list[int]
    fixed: list[int] | None
    """The tokens that must be emitted; None for a free response."""
    max_tokens: int
    expected: int
    """Expected number of response tokens, for distribution over workers."""


class Tokenizer:
    """The target's tokenizer, and the tokens that end its responses."""

    def __init__(self, target_dir: str) -> None:
        # Imported here, because it takes seconds, and errors in the trace should be shown before.
        from transformers import AutoTokenizer

        self.hugging_face: Any = AutoTokenizer.from_pretrained(target_dir)
        self.eos_token_ids = sorted(
            {*_ids(self.hugging_face.eos_token_id), *_ids(_generation_config(target_dir).get("eos_token_id"))}
        )

    def prompt(self, text: str) -> list[int]:
        """A prompt's tokens, as the completions endpoint makes them."""
        return list(self.hugging_face(text, verbose=False)["input_ids"])

    def response(self, text: str) -> list[int]:
        """A response's tokens, without a token for the beginning of a text, since a prompt precedes them."""
        return list(self.hugging_face(text, add_special_tokens=False, verbose=False)["input_ids"])

    def text(self, tokens: list[int]) -> str:
        """The text of a response, without end-of-text and other special tokens."""
        return str(self.hugging_face.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def make_requests(
    cases: Sequence[Case],
    tokenizer: Tokenizer,
    file: Path,
    fixed: bool,
    samples: int,
    max_tokens: int | None,
    room: int,
) -> list[Request]:
    """Requests for a context of `room` tokens.  Raises `TraceError`, which names the first row that does not fit.

    Free responses: `samples` requests per prompt, of at most `max_tokens` (default: `DEFAULT_TOKENS`) or the context's rest.
    Fixed responses: one request per prompt; a response longer than `max_tokens` or the context is an error.
    """
    requests = []
    for case in cases:
        prompt, response = tokenizer.prompt(case.prompt), tokenizer.response(case.gen)
        where = f"{file}: row {case.number}"
        if not prompt:
            raise TraceError(f"{where}: the prompt is empty, and the tokenizer puts no token in front")
        if len(prompt) >= room:
            raise TraceError(f"{where}: the prompt has {len(prompt)} tokens, the context {room}")
        if not fixed:
            most = min(max_tokens or DEFAULT_TOKENS, room - len(prompt))
            expected = min(len(response), most) or most
            numbers = range(samples * case.number, samples * (case.number + 1))
            requests += [Request(number, case, prompt, None, most, expected) for number in numbers]
            continue
        if not response:
            raise TraceError(f"{where}: the response to {shown(case.prompt)} is empty")
        if len(prompt) + len(response) > room:
            raise TraceError(f"{where}: {len(prompt)} tokens of prompt and {len(response)} of response, the context has {room}")
        if max_tokens is not None and len(response) > max_tokens:
            raise TraceError(f"{where}: the response has {len(response)} tokens, more than --max-tokens {max_tokens}")
        requests.append(Request(case.number, case, prompt, response, len(response), len(response)))
    return requests


def context_length(target_dir: str, asked: int | None) -> int:
    """The longest context that a verifier can offer: the smaller of `asked` and the limit in the model's configuration."""
    own = text_config(read_config(target_dir)).get("max_position_embeddings")
    limits = [limit for limit in (asked, own) if isinstance(limit, int)]
    return min(limits) if limits else 2**31


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _generation_config(target_dir: str) -> dict[str, Any]:
    try:
        content = json.loads((Path(target_dir) / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # the file is optional
    return content if isinstance(content, dict) else {}
