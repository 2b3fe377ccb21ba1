"""What callers of the Python API are given.  Any process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class OutriderError(Exception):
    """A request was refused, or could not be answered; `status` is 0 where no answer came."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status} {code}: {message}" if code else f"{status}: {message}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class WeightSpan:
    """Tokens `[start, end)` of an output were drawn by the weights that the update named so."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """One finished output."""

    index: int
    """Position of the prompt in the call."""
    sample: int
    """Number of the sample of that prompt, from 0."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The output, with the token that ended it if any."""
    text: str | None
    """None if `detokenize` was false."""
    logprobs: list[float] | None
    """Natural logarithms of the output tokens' probabilities, if `logprobs` was asked for."""
    finish_reason: str
    """`stop`, `length`, or `abort` where somebody else ended it."""
    weight_versions: list[WeightSpan]
    """More than one where weights were exchanged meanwhile."""
    cached_tokens: int
    """Tokens of the prompt that the verifier had in its prefix cache."""
    account: dict[str, Any] | None
    """What its drafts brought, such as `tokens_per_verification`, `drafted` and `accepted`; None where the fleet sends none."""

    @property
    def weight_version(self) -> str | None:
        """Version of the weights that drew the last token; None for an empty output."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass
class Episode:
    """A conversation of the model with an environment."""

    index: int
    """Position of its start in the call."""
    sample: int
    """Number of the episode from that start, from 0."""
    token_ids: list[int]
    """All of it: the start, outputs, and what the environment said."""
    output_mask: list[bool] = field(default_factory=list)
    """Which of `token_ids` are outputs; as long."""
    turns: list[Sample] = field(default_factory=list)
    """The outputs so far.  A turn's `prompt_token_ids` are everything before it."""
    reward: float | None = None
    """What the environment ended it with."""
    state: Any = None
    """For the environment."""
