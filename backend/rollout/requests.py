"""Makes requests of cases: tokenizes them, and checks everything that can be checked before a run.  The command's process."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.rollout.trace import Case, TraceError, shown

# Importing vLLM takes seconds, and errors in the trace should be shown before.
if TYPE_CHECKING:
    from backend.engine.front import SamplingParams
    from backend.engine.front.offline import OfflineProcessor


@dataclass(frozen=True)
class RolloutRequest:
    """One response to a prompt."""

    number: int
    """Its `req_id`: the row in the trace times the responses per prompt, plus the response's index for that prompt."""
    case: Case
    prompt: list[int]
    fixed: list[int] | None
    """The tokens that must be emitted; None for a free response."""
    params: SamplingParams
    """Shared by all responses to the prompt."""
    expected: int
    """Expected number of response tokens, for distribution over workers."""
    seed: int | None = None
    """None: the sampling parameters have none."""


class Tokenizer:
    """The target's tokenizer; it runs code of the checkpoint's own only if that is trusted."""

    def __init__(self, target_dir: str, trusts_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._hugging_face: Any = AutoTokenizer.from_pretrained(target_dir, trust_remote_code=trusts_code)

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt's tokens, as the completions endpoint makes them."""
        return list(self._hugging_face(text, verbose=False)["input_ids"])

    def encode_response(self, text: str) -> list[int]:
        """A response's tokens, without a token for the beginning of a text, since a prompt precedes them."""
        return list(self._hugging_face(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        """The text of a response, without end-of-text and other special tokens."""
        return str(self._hugging_face.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def make_requests(
    cases: Sequence[Case], tokenizer: Tokenizer, file: Path, options: Namespace, front: OfflineProcessor
) -> list[RolloutRequest]:
    """Requests for one round.  Raises `TraceError`, which names the first row of `file` that cannot be run.

    Free responses: `options.samples` requests per prompt, each of at most `max_tokens` or the context's rest.  The parameters
    in a case come before those in `options`.
    Fixed responses: one request per prompt; a response longer than `--max-tokens` or the context is an error.
    """
    from backend.engine.client import fixed_sampling

    requests = []
    room, samples = front.max_model_len, options.samples
    for case in cases:
        prompt, response = tokenizer.encode_prompt(case.prompt), tokenizer.encode_response(case.gen)
        where = f"{file}: row {case.number}"
        if not prompt:
            raise TraceError(f"{where}: the prompt is empty, and the tokenizer puts no token in front")
        if len(prompt) >= room:
            raise TraceError(f"{where}: the prompt has {len(prompt)} tokens, the context {room}")
        if not options.fixed:
            try:
                params = front.params(prompt, options.sampling | case.sampling)
            except ValueError as error:
                raise TraceError(f"{where}: sampling_params: {error}") from error
            params.max_tokens = most = min(params.max_tokens or room, room - len(prompt))
            expected = min(len(response), most) or most
            for index in range(samples):
                seed = None if params.seed is None else params.seed + index
                requests.append(RolloutRequest(samples * case.number + index, case, prompt, None, params, expected, seed))
            continue
        if case.sampling:
            raise TraceError(f"{where}: --fixed-responses says what is emitted: no sampling_params beside it")
        if not response:
            raise TraceError(f"{where}: the response to {shown(case.prompt)} is empty")
        if len(prompt) + len(response) > room:
            raise TraceError(f"{where}: {len(prompt)} tokens of prompt and {len(response)} of response, the context has {room}")
        most = options.max_tokens or room
        if len(response) > most:
            raise TraceError(f"{where}: the response has {len(response)} tokens, more than --max-tokens {most}")
        params = fixed_sampling(response, options.sampling["temperature"])
        requests.append(RolloutRequest(case.number, case, prompt, response, params, len(response)))
    return requests
